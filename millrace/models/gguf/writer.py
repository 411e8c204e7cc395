"""Writes safetensors files piece by piece, so that a model never has to fit in memory twice.

Room for the head is kept at the start of each file and filled, padded with spaces as the format
allows, once all data is behind it. Large models become numbered files with an index.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
import numpy.typing as npt

DType = Literal["F32", "F16", "BF16", "U32", "I8"]
_ITEM = {"F32": 4, "F16": 2, "BF16": 2, "U32": 4, "I8": 1}
_SHARD = 4 * 1024**3


@dataclass(frozen=True)
class Array:
    """Values with the type they have in the file; bfloat16 travels as its 16-bit patterns."""

    dtype: DType
    data: npt.NDArray[Any]


def as_array(data: npt.NDArray[Any]) -> Array:
    names: dict[str, DType] = {"float32": "F32", "float16": "F16", "uint32": "U32", "int8": "I8"}
    return Array(names[data.dtype.name], data)


class SafetensorsWriter:
    """Fills `folder` with `model.safetensors`, or with shards and their index.

    Files may be named after another `stem`. Where nothing is added, nothing is written.
    """

    def __init__(
        self, folder: Path, names: int, shard: int = _SHARD, *, stem: str = "model"
    ) -> None:
        self._folder = folder
        self._stem = stem
        self._room = 4096 + 256 * names
        self._shard = shard
        self._files: list[Path] = []
        self._where: dict[str, int] = {}
        self._head: dict[str, Any] = {}
        self._out: BinaryIO | None = None
        self._size = 0
        self._total = 0

    def add(self, name: str, array: Array) -> None:
        data = np.ascontiguousarray(array.data)
        if self._out is None or (self._size and self._size + data.nbytes > self._shard):
            self._next_file()
        assert self._out is not None
        assert data.itemsize == _ITEM[array.dtype]
        self._head[name] = {
            "dtype": array.dtype,
            "shape": list(data.shape),
            "data_offsets": [self._size, self._size + data.nbytes],
        }
        self._out.write(data.reshape(-1).view(np.uint8).data)
        self._size += data.nbytes
        self._total += data.nbytes
        self._where[name] = len(self._files) - 1

    def close(self) -> None:
        """Finish the last file and give all files their final names."""
        self._finish_file()
        count = len(self._files)
        if count == 0:
            return
        if count == 1:
            os.replace(self._files[0], self._folder / f"{self._stem}.safetensors")
            return
        names = [f"{self._stem}-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
        for file, name in zip(self._files, names, strict=True):
            os.replace(file, self._folder / name)
        index = {
            "metadata": {"total_size": self._total},
            "weight_map": {name: names[at] for name, at in self._where.items()},
        }
        file = self._folder / f"{self._stem}.safetensors.index.json"
        file.write_text(json.dumps(index, indent=1))

    def _next_file(self) -> None:
        self._finish_file()
        path = self._folder / f"part-{self._stem}-{len(self._files):05d}"
        self._files.append(path)
        self._head, self._size = {"__metadata__": {"format": "mlx"}}, 0
        self._out = path.open("wb")
        self._out.write(b" " * (8 + self._room))

    def _finish_file(self) -> None:
        if self._out is None:
            return
        head = json.dumps(self._head, separators=(",", ":")).encode()
        assert len(head) <= self._room
        self._out.seek(0)
        self._out.write(self._room.to_bytes(8, "little") + head.ljust(self._room))
        self._out.flush()
        os.fsync(self._out.fileno())
        self._out.close()
        self._out = None
