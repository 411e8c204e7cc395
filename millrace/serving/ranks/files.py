"""Whether two machines have the same model: names and sizes of weights, and what the small files hold."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from millrace.distributed.messages import ModelFile

_TOLD = ("config.json", "model.safetensors.index.json")


def files_of(folder: Path) -> tuple[ModelFile, ...]:
    found = []
    for path in sorted(folder.glob("model*.safetensors")):
        found.append(ModelFile(path.name, path.stat().st_size))
    for name in _TOLD:
        path = folder / name
        if path.is_file():
            data = path.read_bytes()
            found.append(ModelFile(name, len(data), hashlib.sha256(data).hexdigest()))
    return tuple(found)


def difference(wanted: Sequence[ModelFile], there: Sequence[ModelFile]) -> str | None:
    """What is not as wanted, in words."""
    have = {file.name: file for file in there}
    for file in wanted:
        mine = have.get(file.name)
        if mine is None:
            return f"it has no {file.name}"
        if mine.size != file.size:
            return f"{file.name} has {mine.size} bytes and there {file.size}"
        if mine.digest != file.digest:
            return f"{file.name} says something else"
    return None
