"""What models lie on this machine, and what a model folder holds, told from its files alone.

Two places are looked at: the models millrace made in its own home, and the Hugging Face cache.
No tensor is read; sizes and shapes come from the heads of the safetensors files.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec

from millrace.config import home
from millrace.errors import ModelError
from millrace.models.files import read_json

MARKER = "millrace.json"
INDEX = "model.safetensors.index.json"
REMOVED = ".removed-"

Source = Literal["default", "folder", "hub", "gguf"]

_TOKENIZERS = (
    "tokenizer.json",
    "tokenizer.model",
    "tiktoken.model",
    "vocab.json",
    "spiece.model",
)
_SENTENCES = "modules.json"
"""What sentence-transformers write into a folder: the model makes embeddings."""
_SPOKEN = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")


class Marker(msgspec.Struct, frozen=True):
    """What millrace notes in a folder it made: by which rules, and out of what."""

    format: int
    source: Source
    origin: str


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the list of models."""

    name: str
    path: str
    bytes: int
    architecture: str
    quantization: str
    context: int | None
    source: Source


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


def models_home() -> Path:
    return home() / "models"


def missing_file(folder: Path) -> str | None:
    """The first file that `folder` lacks to be a whole model, in words; None if it is whole."""
    if not (folder / "config.json").is_file():
        return "config.json"
    if not any((folder / name).is_file() for name in _TOKENIZERS) and not any(
        folder.glob("*.tiktoken")
    ):
        return "tokenizer.json (or another tokenizer file)"
    if (folder / INDEX).is_file():
        shards = set(read_json(folder / INDEX).get("weight_map", {}).values())
        return next((name for name in sorted(shards) if not (folder / name).is_file()), None)
    if not any(folder.glob("model*.safetensors")):
        return "model.safetensors"
    return None


def marker(folder: Path) -> Marker | None:
    try:
        return msgspec.json.decode((folder / MARKER).read_bytes(), type=Marker)
    except (OSError, msgspec.MsgspecError):
        return None


def own_folder(name: str) -> Path | None:
    """The folder of a model millrace made, by its name or by the name of the file it came from."""
    if not name or "/" in name or name.startswith("."):
        return None
    exact = models_home() / name
    if os.path.isfile(exact / "config.json"):
        return exact
    same = [f for f in _own_folders() if (m := marker(f)) and Path(m.origin).stem == name]
    return same[0] if len(same) == 1 else None


def hub_folder(name: str) -> Path | None:
    """The cached snapshot of a Hugging Face model's main branch, whole or not."""
    repo = _hub_cache() / f"models--{name.replace('/', '--')}"
    try:
        commit = (repo / "refs" / "main").read_text().strip()
    except (OSError, ValueError):  # no file has such a name
        return None
    folder = repo / "snapshots" / commit
    return folder if commit and folder.is_dir() else None


def local_models() -> list[Model]:
    """Every whole model on this machine, by name."""
    found = []
    for folder in _own_folders():
        note = marker(folder)
        found.append(_line(folder.name, folder, note.source if note else "folder"))
    for name in _hub_names():
        folder_or_none = hub_folder(name)
        if folder_or_none is not None and _is_servable(folder_or_none):
            found.append(_line(name, folder_or_none, "hub"))
    return sorted((m for m in found if m is not None), key=lambda model: model.name)


def places() -> list[Path]:
    """The folders in which models lie."""
    return [models_home(), _hub_cache()]


def names() -> list[str]:
    return [model.name for model in local_models()]


def remove(name: str) -> int:
    """Delete a model from this machine, also from the cache that other programs share; returns the
    bytes given back."""
    if (own := own_folder(name)) is not None:
        return remove_own(own)
    if hub_folder(name) is None:
        raise ModelError(
            f"There is no model '{name}' on this machine to remove. "
            f"Here are: {', '.join(names()) or 'none'}."
        )
    folder = _hub_cache() / f"models--{name.replace('/', '--')}"
    size = _folder_bytes(folder)
    with _removing(folder):
        shutil.rmtree(folder)
    return size


def remove_own(folder: Path) -> int:
    """Delete a folder of millrace's own models; returns the bytes given back.

    Of a link, the link alone goes: what it leads to is not millrace's.
    """
    if folder.parent != models_home():
        raise ModelError(f"{folder} is not one of millrace's own models.")
    with _removing(folder):
        if folder.is_symlink():
            folder.unlink()
            return 0
        size = _folder_bytes(folder)
        shutil.rmtree(folder.rename(folder.with_name(f"{REMOVED}{folder.name}-{os.getpid()}")))
    return size


@contextlib.contextmanager
def _removing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ModelError(f"{folder} cannot be removed: {error.strerror or error}.") from None


def describe(folder: Path) -> ModelDescription:
    if (missing := missing_file(folder)) is not None:
        raise ModelError(f"The model folder {folder} is incomplete: {missing} is missing.")
    config = read_json(folder / "config.json")
    text = _text_config(config)
    heads = list(tensor_heads(folder))
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
        bytes=_folder_bytes(folder),
        dtype=_dtype_name(floats[0]) if floats else "unknown",
        quantization=_quantization(config),
        context=_context(text),
        eos=_eos(folder, config),
        chat_template=template or bool(_tokenizer_config(folder).get("chat_template")),
        vocabulary=_whole(text.get("vocab_size")),
    )


def _line(name: str, folder: Path, source: Source) -> Model | None:
    """None for one that is not whole, or cannot be read."""
    try:
        return _described(name, folder, source)
    except ModelError:
        return None


def _described(name: str, folder: Path, source: Source) -> Model | None:
    if missing_file(folder) is not None:
        return None
    config = read_json(folder / "config.json")
    text = _text_config(config)
    dtype = text.get("torch_dtype") or text.get("dtype") or config.get("torch_dtype") or "unknown"
    return Model(
        name=name,
        path=str(folder),
        bytes=_folder_bytes(folder),
        architecture=_architecture(config),
        quantization=_quantization(config) or str(dtype),
        context=_context(text),
        source=source,
    )


def _own_folders() -> list[Path]:
    try:
        entries = sorted(models_home().iterdir())
    except OSError:
        return []
    return [e for e in entries if not e.name.startswith(".") and (e / "config.json").is_file()]


def _hub_cache() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def _hub_names() -> list[str]:
    return [
        folder.name.removeprefix("models--").replace("--", "/", 1)
        for folder in sorted(_hub_cache().glob("models--*--*"))
    ]


def _is_servable(folder: Path) -> bool:
    try:
        if missing_file(folder) is not None:
            return False
        config = read_json(folder / "config.json")
    except ModelError:
        return False
    classes = config.get("architectures") or []
    spoken = not classes or any(str(c).endswith(_SPOKEN) for c in classes)
    return "model_type" in config and (spoken or (folder / _SENTENCES).is_file())


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
        bits = sorted({int(s["bits"]) for s in [setting, *own] if "bits" in s})
        mode = setting.get("mode", "affine")
        return f"{'/'.join(map(str, bits))}-bit" + ("" if mode == "affine" else f" {mode}")
    other = config.get("quantization_config")
    return str(other.get("quant_method", "quantised")) if isinstance(other, dict) else None


def _eos(folder: Path, config: dict[str, Any]) -> list[int]:
    """Every id that any of the folder's files names as an end."""
    generation = read_json(folder / "generation_config.json", optional=True)
    sources = [config, _text_config(config), generation]
    ids: list[int] = []
    for source in sources:
        value = source.get("eos_token_id")
        ids += [i for i in (value if isinstance(value, list) else [value]) if isinstance(i, int)]
    if (named := _tokenizer_eos(folder)) is not None:
        ids.append(named)
    return list(dict.fromkeys(ids))


def _tokenizer_eos(folder: Path) -> int | None:
    token = _tokenizer_config(folder).get("eos_token")
    content = token.get("content") if isinstance(token, dict) else token
    if not content or not (folder / "tokenizer.json").is_file():
        return None
    tokenizer = read_json(folder / "tokenizer.json")
    for added in tokenizer.get("added_tokens") or []:
        if added.get("content") == content:
            return _whole(added.get("id"))
    vocabulary = (tokenizer.get("model") or {}).get("vocab")
    return _whole(vocabulary.get(content)) if isinstance(vocabulary, dict) else None


def tensor_heads(folder: Path) -> Iterator[tuple[str, str, list[int]]]:
    """Name, type and shape of every tensor, from the files' heads."""
    for path in sorted(folder.glob("model*.safetensors")):
        try:
            with path.open("rb") as file:
                size = int.from_bytes(file.read(8), "little")
                if size > path.stat().st_size:
                    raise ValueError("its head is cut short")
                head = json.loads(file.read(size))
            for name, entry in head.items():
                if name != "__metadata__":
                    yield name, entry["dtype"], entry["shape"]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(
                f"{path} is not a sound safetensors file: {error}. Fetch the model again."
            ) from None


def parameters(heads: list[tuple[str, str, list[int]]], config: dict[str, Any]) -> int:
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


def _folder_bytes(folder: Path) -> int:
    """The bytes of all files under `folder`; links count once, as what they point to."""
    seen: dict[tuple[int, int], int] = {}
    for path in folder.rglob("*"):
        try:
            status = path.stat()
        except OSError:
            continue
        if path.is_file():
            seen[status.st_dev, status.st_ino] = status.st_size
    return sum(seen.values())
