"""Tiny vision-language models of the real classes with random weights, and their processors' real files.

A folder is what a user would serve: configuration, weights, tokenizer, processor. Nothing is downloaded.
"""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import tiny_tokenizer
from mlx.utils import tree_flatten, tree_map
from PIL import Image
from vision_kinds import ALL, IMAGE

from millrace.protocol import Picture, Span, Tensor


def write(kind: str, folder: Path, seed: int = 0, **text: Any) -> Path:
    """Write a model of a kind into `folder`; `text` is what differs in its text tower."""
    made_of = ALL[kind]
    tiny_tokenizer.write(folder, made_of.special, **made_of.tokenizer)
    config = {"model_type": kind, "eos_token_id": 2, **made_of.config}
    if text and "text_config" in config:
        text = {"text_config": config["text_config"] | text}
    config |= text
    _dump(folder / "config.json", config)
    _dump(folder / "preprocessor_config.json", made_of.pixels)
    if made_of.processor:
        _dump(folder / "processor_config.json", made_of.processor)
    module = importlib.import_module(f"mlx_vlm.models.{config['model_type']}")
    from mlx_vlm.utils import update_module_configs

    settings = json.loads(json.dumps(config))
    settings.setdefault("text_config", settings.pop("llm_config", {}))
    parts = ["text", "vision", "perceiver", "projector", "audio"]
    made = module.ModelConfig.from_dict(settings)
    made = update_module_configs(made, module, settings, parts)
    mx.random.seed(seed)
    model = module.Model(made)
    weights = dict(tree_flatten(tree_map(_spread, model.parameters())))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    return folder


@dataclass
class Told:
    """A prompt with pictures: what the engine is told, and what mlx-vlm's own generate is given."""

    prompt: list[int]
    spans: list[Span]
    pictures: dict[str, Picture]
    together: dict[str, Any]
    """All pictures' tensors at once."""


class Reader:
    """A folder's real processor."""

    def __init__(self, kind: str, folder: Path) -> None:
        from mlx_vlm.utils import load_processor

        self.kind = kind
        self._processor = load_processor(folder)

    def read(self, text: str, *images: Any) -> Told:
        """`{}` in the text is where a picture stands."""
        written = text.format(*[ALL[self.kind].text] * len(images))
        prompt, together = self._run(written, images)
        spans: list[Span] = []
        pictures: dict[str, Picture] = {}
        at = 0
        for image in images:
            ids, tensors = self._run(ALL[self.kind].text, [image])
            places = [i for i, token in enumerate(ids) if token == IMAGE]
            run = ids[places[0] : places[-1] + 1]
            at = next(i for i in range(at, len(prompt)) if prompt[i : i + len(run)] == run)
            digest = hashlib.blake2b(image.tobytes() + bytes(str(image.size), "ascii")).hexdigest()
            grid = tensors.get("image_grid_thw")
            patches = tuple(grid[0].tolist()) if grid is not None else ()
            spans.append(Span(at, len(run), digest, patches))
            pictures[digest] = Picture(digest, {n: _tensor(t) for n, t in tensors.items()})
            at += len(run)
        return Told(prompt, spans, pictures, together)

    def _run(self, text: str, images: Sequence[Any]) -> tuple[list[int], dict[str, Any]]:
        if images:
            found = dict(self._processor(text=[text], images=list(images)))
        else:
            found = dict(self._processor.tokenizer([text]))
        ids = found.pop("input_ids")
        for name in ("attention_mask", "token_type_ids"):
            found.pop(name, None)
        return np.array(ids).reshape(-1).tolist(), {n: _arrays(t) for n, t in found.items()}


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    dice = np.random.default_rng(seed)
    return Image.fromarray(dice.integers(0, 256, (height, width, 3), dtype=np.uint8))


def _arrays(value: Any) -> Any:
    """Pictures of different sizes may come as a list."""
    if isinstance(value, list) and len({np.shape(each) for each in value}) > 1:
        return [mx.array(np.array(each)) for each in value]
    return mx.array(np.array(value))


def _tensor(array: mx.array) -> Tensor:
    plain = np.array(array)
    return Tensor(str(plain.dtype), plain.shape, plain.tobytes())


def _spread(value: mx.array) -> mx.array:
    """Wide enough apart that no two logits tie."""
    if value.ndim < 2:
        return value.astype(mx.float32)
    size = value.size // value.shape[0]
    return mx.random.normal(value.shape) * (1.5 / size**0.5)


def _dump(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value), encoding="utf-8")
