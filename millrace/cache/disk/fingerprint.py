"""Tells whether stored state belongs to this model: one digest over all that decides its values.

Weights are sampled, not read: a model of 100 GB costs milliseconds.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

FORMAT = 2
"""Raise it when files or index change their meaning."""

_WEIGHTS = {".safetensors", ".gguf", ".npz", ".bin", ".pt", ".pth"}
_CODE = {".py"}
_SAMPLES = 16
_SAMPLE = 4096
_HEAD = 16 << 20


def fingerprint(model_folder: Path, *, dtype: str, layout: str, versions: dict[str, str]) -> str:
    """Hex digest over the model's configuration, code and weights, the precision, the layout of
    the cache and the versions of what computes it."""
    digest = hashlib.sha256()

    def add(*parts: str | bytes | int) -> None:
        for part in parts:
            raw = part if isinstance(part, bytes) else str(part).encode()
            digest.update(len(raw).to_bytes(8, "little") + raw)

    add("format", FORMAT, "dtype", dtype, "layout", layout)
    for name, version in sorted(versions.items()):
        add("version", name, version)
    for path in sorted(_files(model_folder)):
        name = path.relative_to(model_folder).as_posix() if path != model_folder else path.name
        if path.suffix in _WEIGHTS:
            add("weights", name, *_sampled(path))
        else:
            add("text", name, path.read_bytes())
    return digest.hexdigest()


def _files(folder: Path) -> Iterator[Path]:
    """What decides the model's values. Tokenizer and templates do not: the tree holds tokens."""
    if folder.is_file():
        yield folder
        return
    for path in folder.rglob("*"):
        kind = path.suffix in _WEIGHTS | _CODE or path.name == "config.json"
        if kind and path.is_file():
            yield path


def _sampled(path: Path) -> Iterator[int | bytes]:
    with path.open("rb", buffering=0) as file:
        stat = os.fstat(file.fileno())
        yield stat.st_size
        yield stat.st_mtime_ns
        if path.suffix == ".safetensors":
            length = int.from_bytes(file.read(8), "little")
            yield file.read(min(length, _HEAD))
        last = max(stat.st_size - _SAMPLE, 0)
        for i in range(_SAMPLES):
            file.seek(last * i // (_SAMPLES - 1))
            yield file.read(_SAMPLE)
