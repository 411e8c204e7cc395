"""What a model folder holds, told from its files alone, and whether they are sound.

No tensor is read; sizes and shapes come from the heads of the safetensors files. Everything that lists
models asks `inspect`, so that a broken folder is shown with its reason and the others are as before.
"""

from __future__ import annotations

import functools
import math
import os
import stat
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from millrace.errors import ModelError
from millrace.models import safetensors
from millrace.models.ends import end_ids
from millrace.models.files import MOST_TOKENIZER, decode_json, entries, read_json, reads_folder
from millrace.models.safetensors import TensorHead
from millrace.models.window import is_candidate, read_config

INDEX = "model.safetensors.index.json"
_MOST_INDEX = 64 << 20
_MOST_COUNTED = 100_000
"""Files whose sizes are added up."""
_TOKENIZERS = (
    "tokenizer.json",
    "tokenizer.model",
    "tiktoken.model",
    "vocab.json",
    "spiece.model",
)


class _Index(msgspec.Struct):
    """What an index says of the files that a model's weights are in."""

    weight_map: dict[str, str] = {}


class ModelDescription(msgspec.Struct, frozen=True, kw_only=True):
    """All that a model folder says about itself."""

    path: str
    architecture: str
    parameters: int
    bytes: int
    dtype: str
    quantization: str | None
    context: int | None
    eos: list[int]
    chat_template: bool
    vocabulary: int | None


class Inspection(msgspec.Struct, frozen=True):
    """A folder as it was found: what it describes, or what is broken in it."""

    about: ModelDescription | None = None
    error: str | None = None


FolderStamp = tuple[tuple[str, int, int, int], ...]


def stamp(folder: Path) -> FolderStamp:
    """A value that changes whenever a file of the folder, or of a folder in it, does."""
    try:
        return tuple(_stamps(folder, "", deeper=True))
    except (OSError, ValueError, ModelError):
        return ()


def _stamps(folder: Path, prefix: str, *, deeper: bool) -> list[tuple[str, int, int, int]]:
    found = []
    for entry in entries(folder):
        name = prefix + entry.name
        try:
            status = entry.stat()
        except OSError:
            found.append((name, 0, 0, 0))
            continue
        found.append((name, status.st_mtime_ns, status.st_size, status.st_ino))
        if deeper and stat.S_ISDIR(status.st_mode):
            found += _stamps(folder / entry.name, f"{name}/", deeper=False)
    return found


def inspect(folder: Path) -> Inspection:
    """What a folder describes, or why it cannot be served; read again when a file of it has changed."""
    return _inspected(folder, stamp(folder))


@functools.lru_cache(maxsize=1024)
def _inspected(folder: Path, stamp: FolderStamp) -> Inspection:
    try:
        return Inspection(about=describe(folder))
    except ModelError as error:
        return Inspection(error=error.message)


@reads_folder
def missing_file(folder: Path) -> str | None:
    """The first file that `folder` lacks to be a whole model, in words; None if it is whole.

    Raises ModelError where the files that say so are broken.
    """
    if not is_candidate(folder):
        return "config.json"
    found = {entry.name for entry in entries(folder)}
    if found.isdisjoint(_TOKENIZERS) and not any(name.endswith(".tiktoken") for name in found):
        return "tokenizer.json (or another tokenizer file)"
    if INDEX in found:
        shards = decode_json(folder / INDEX, _Index, _MOST_INDEX).weight_map.values()
        for name in sorted(set(shards)):
            if os.path.isabs(name) or ".." in name.split("/") or "\0" in name:
                raise ModelError(f"{folder / INDEX} names a file outside of the folder: {name!r}.")
            if not os.path.exists(folder / name):
                return name
        return None
    return None if any(map(_is_weights, found)) else "model.safetensors"


@reads_folder
def describe(folder: Path) -> ModelDescription:
    """What a folder says of its model; raises ModelError with what is broken or missing in it."""
    config = read_config(folder)
    if (missing := missing_file(folder)) is not None:
        raise ModelError(f"The model folder {folder} is incomplete: {missing} is missing.")
    _check_kinds(folder)
    if os.path.exists(tokenizer := folder / "tokenizer.json"):
        decode_json(tokenizer, dict[str, msgspec.Raw], MOST_TOKENIZER)
    text = _text_config(config)
    heads = tensor_heads(folder)
    kinds = Counter[str]()
    for _, dtype, shape in heads:
        kinds[dtype] += math.prod(shape)
    floats = [k for k, _ in kinds.most_common() if k not in ("U32", "U8")]
    template = any(
        (folder / name).is_file() for name in ("chat_template.jinja", "chat_template.json")
    )
    return ModelDescription(
        path=str(folder),
        architecture=_architecture(config),
        parameters=parameters(heads, config),
        bytes=folder_bytes(folder),
        dtype=_dtype_name(floats[0]) if floats else "unknown",
        quantization=_quantization(config),
        context=_context(text),
        eos=sorted(end_ids(folder)),
        chat_template=template or bool(_tokenizer_config(folder).get("chat_template")),
        vocabulary=_whole(text.get("vocab_size")),
    )


def _check_kinds(folder: Path) -> None:
    """Raise for a pipe, a socket or a device in a folder: whoever opened it would wait for ever."""
    for entry in entries(folder):
        try:
            mode = entry.stat().st_mode
        except OSError:
            continue  # a link to nothing is refused by whoever needs it
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            raise ModelError(f"{folder / entry.name} is not a regular file. Remove it.")


def _tokenizer_config(folder: Path) -> dict[str, Any]:
    return read_json(folder / "tokenizer_config.json", optional=True)


def _text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The part of a config.json that speaks of the language model."""
    nested = config.get("text_config") or config.get("llm_config")
    return config | nested if isinstance(nested, dict) else config


def _architecture(config: dict[str, Any]) -> str:
    return str(config.get("model_type") or (config.get("architectures") or ["unknown"])[0])


def _context(text: dict[str, Any]) -> int | None:
    for key in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"):
        if (value := _whole(text.get(key))) is not None:
            return value
    return None


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _quantization(config: dict[str, Any]) -> str | None:
    setting = config.get("quantization")
    if isinstance(setting, dict):
        own = [v for v in setting.values() if isinstance(v, dict) and "bits" in v]
        bits = sorted({int(s["bits"]) for s in [setting, *own] if s.get("bits") is not None})
        mode = setting.get("mode", "affine")
        return f"{'/'.join(map(str, bits))}-bit" + ("" if mode == "affine" else f" {mode}")
    other = config.get("quantization_config")
    return str(other.get("quant_method", "quantised")) if isinstance(other, dict) else None


def _is_weights(name: str) -> bool:
    return name.startswith("model") and name.endswith(".safetensors")


@reads_folder
def weight_files(folder: Path) -> list[Path]:
    return [folder / entry.name for entry in entries(folder) if _is_weights(entry.name)]


@reads_folder
def tensor_heads(folder: Path) -> list[TensorHead]:
    """Name, type and shape of every tensor, from the files' heads."""
    return [head for file in weight_files(folder) for head in safetensors.heads(file)]


def parameters(heads: list[TensorHead], config: dict[str, Any]) -> int:
    """The number of weights, quantised ones counted as what they stand for."""
    setting = config.get("quantization")
    setting = setting if isinstance(setting, dict) else {}
    scales = {n.removesuffix(".scales"): s for n, _, s in heads if n.endswith(".scales")}
    count = 0
    for name, dtype, shape in heads:
        module, _, part = name.rpartition(".")
        if module in scales and part in ("scales", "biases"):
            continue
        if module in scales and part == "weight" and dtype == "U32":
            own = setting.get(module)
            group = (own if isinstance(own, dict) else setting).get("group_size", 64)
            count += math.prod(scales[module]) * int(group)
        else:
            count += math.prod(shape)
    return count


def _dtype_name(kind: str) -> str:
    names = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64"}
    return names.get(kind, kind.lower())


def folder_bytes(folder: Path) -> int:
    """The bytes of all files under `folder`; links count once, as what they point to."""
    seen: dict[tuple[int, int], int] = {}
    looked = 0
    for place, _, names in os.walk(folder):
        for name in names:
            looked += 1
            try:
                status = os.stat(os.path.join(place, name))
            except OSError:
                continue
            if stat.S_ISREG(status.st_mode):
                seen[status.st_dev, status.st_ino] = status.st_size
        if looked > _MOST_COUNTED:
            break
    return sum(seen.values())
