"""The whole import: a GGUF file in, a model folder out that mlx-lm and transformers can load."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from millrace.models.checked import check_config
from millrace.models.files import interpreting, reads_folder
from millrace.models.gguf.architectures import ConversionPlan, plan
from millrace.models.gguf.reader import GGUF, open_gguf
from millrace.models.gguf.tokenizer import BuiltTokenizer, build_tokenizer
from millrace.models.gguf.weights import half_type, write_weights


def _ignore(done: int, total: int) -> None:
    pass


def convert(
    source: Path,
    folder: Path,
    *,
    exact: bool = False,
    sampling: dict[str, float] | None = None,
    done: Callable[[int, int], None] = _ignore,
) -> None:
    """Fill the existing, empty `folder` with the model in `source`.

    `exact` stores types without an exact MLX form in float32 in place of float16. `sampling` holds
    the defaults that the model's authors recommend. `done` is told the bytes read so far and the
    bytes to read.
    """
    model, layout, tokenizer = _read(source)
    with interpreting(source, writing=True):
        quantization = write_weights(model, layout, folder, exact=exact, done=done)
    ends = {
        "bos_token_id": tokenizer.bos,
        "eos_token_id": tokenizer.eos,
        "pad_token_id": tokenizer.pad,
    }
    ends = {key: value for key, value in ends.items() if value is not None}
    dtype = "bfloat16" if half_type(model) == "BF16" else "float16"
    config = layout.config | ends | {"torch_dtype": dtype}
    if quantization is not None:
        config["quantization"] = quantization
    _write(folder / "config.json", config)
    _write(folder / "generation_config.json", ends | (sampling or {}))
    tokenizer.tokenizer.save(str(folder / "tokenizer.json"))
    _write(
        folder / "tokenizer_config.json",
        {"model_max_length": config["max_position_embeddings"], **tokenizer.settings},
    )


@reads_folder
def _read(source: Path) -> tuple[GGUF, ConversionPlan, BuiltTokenizer]:
    """All of a file but its tensors."""
    model = open_gguf(source)
    layout = plan(model)
    check_config(layout.config, source)
    return model, layout, build_tokenizer(model)


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
