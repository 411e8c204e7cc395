"""Reads GGUF containers: metadata, and tensors as raw blocks over a memory map.

Split files are joined here. Every way a file can be broken ends as a ModelError that names the
file and what is wrong with it. What the metadata means is for others to say.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from millrace.errors import ModelError
from millrace.models.files import open_regular
from millrace.sizes import format_bytes

T = TypeVar("T")

_SPLIT = re.compile(r"^(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$")
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9
_ALIGNMENT = 32
_MOST_ALIGNMENT = 1 << 20
_MOST_TENSORS = 1 << 17
_MOST_PAIRS = 1 << 16
_MOST_HEAD = 256 << 20
"""Bytes of all that comes before the tensors; the largest vocabularies take about 21 MB of it."""
_MOST_VALUES = 4 << 20
"""Values of all arrays together: each becomes an object of many bytes."""
_MOST_NESTED = 4
"""Arrays inside arrays."""


@dataclass(frozen=True)
class GgufTensor:
    """One tensor: its shape with rows first, its ggml type, and its bytes as they lie."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    raw: npt.NDArray[np.uint8]

    @property
    def rows(self) -> npt.NDArray[np.uint8]:
        """The bytes, one line per row of the innermost dimension."""
        return self.raw.reshape(math.prod(self.shape[:-1]), -1)

    def floats(self) -> npt.NDArray[np.float32]:
        """All values in float32, by the `gguf` package's own dequantisation."""
        from gguf.quants import dequantize

        layout = (*self.shape[:-1], -1)
        blocks: npt.NDArray[Any] = self.raw
        if self.kind == GGMLQuantizationType.F32:
            return blocks.view(np.float32).reshape(self.shape)
        if self.kind == GGMLQuantizationType.F16:
            return blocks.view(np.float16).astype(np.float32).reshape(self.shape)
        if self.kind == GGMLQuantizationType.F64:
            return blocks.view(np.float64).astype(np.float32).reshape(self.shape)
        try:
            values: npt.NDArray[np.float32] = dequantize(blocks.reshape(layout), self.kind)
        except NotImplementedError:
            raise ModelError(
                f"The tensor '{self.name}' is stored as {self.kind.name}, which the gguf package "
                f"cannot read. Take a conversion of the model in another quantisation type."
            ) from None
        return values.reshape(self.shape)


@dataclass
class GGUF:
    """An opened model: the metadata of its first file and the tensors of all of them."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor] = field(default_factory=dict)

    def need(self, key: str, kind: type[T]) -> T:
        value = self.get(key, kind)
        if value is None:
            raise ModelError(
                f"{self.path} has no metadata '{key}', so it cannot be imported. "
                f"Take another conversion of the model."
            )
        return value

    def get(self, key: str, kind: type[T]) -> T | None:
        """The value under `key`, or None; a value of another type is an error."""
        value = self.metadata.get(key)
        if value is None:
            return None
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            return kind(value)  # type: ignore[call-arg]
        if isinstance(value, float) and not math.isfinite(value):
            raise ModelError(
                f"{self.path} is corrupt: its metadata '{key}' is {value}, which is not a finite "
                f"number. Download it again, or take another conversion of the model."
            )
        if not isinstance(value, kind):
            raise ModelError(
                f"{self.path} is not a sound GGUF file: '{key}' should be "
                f"{kind.__name__}, but is {type(value).__name__}."
            )
        return value


def open_gguf(path: Path) -> GGUF:
    """Open `path`, together with its other parts where it is split."""
    first, *others = _parts(path)
    model = _read(first)
    if not others and (model.get("split.count", int) or 1) > 1:
        raise ModelError(
            f"{path} is one part of a split model, but its name lacks the '-00001-of-0000N.gguf' "
            f"ending by which the other parts are found. Give the parts their own names back."
        )
    for part in others:
        for name, tensor in _read(part).tensors.items():
            if name in model.tensors:
                raise ModelError(f"{part} repeats the tensor '{name}' of an earlier part.")
            model.tensors[name] = tensor
    return model


def _parts(path: Path) -> list[Path]:
    match = _SPLIT.match(path.name)
    if match is None:
        return [path]
    stem, count = match["stem"], int(match["count"])
    parts = [path.with_name(f"{stem}-{i:05d}-of-{count:05d}.gguf") for i in range(1, count + 1)]
    for part in parts:
        if not part.is_file():
            raise ModelError(
                f"{path} is split into {count} files, and {part.name} is missing beside it."
            )
    return parts


def _read(path: Path) -> GGUF:
    try:
        with open_regular(path) as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError:
        raise ModelError(f"{path} is empty, so it is not a GGUF file. Download it again.") from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}.") from None
    cursor = _Cursor(path, data)
    if data[:4] != b"GGUF":
        raise ModelError(
            f"{path} is not a GGUF file: it starts with {data[:4]!r} in place of b'GGUF'."
        )
    cursor.at = 4
    version = cursor.scalar("I")
    if version not in (2, 3):
        swapped = version & 0xFFFF == 0
        what = "written for big-endian machines" if swapped else f"of GGUF version {version}"
        raise ModelError(f"{path} is {what}; versions 2 and 3, little-endian, can be read.")
    tensor_count = cursor.count("tensors", 24, _MOST_TENSORS)
    pair_count = cursor.count("metadata pairs", 13, _MOST_PAIRS)
    metadata: dict[str, Any] = {}
    for _ in range(pair_count):
        key = cursor.string()
        if key in metadata:
            raise cursor.corrupt(f"it has the metadata '{key[:100]}' twice")
        metadata[key] = cursor.value(cursor.scalar("I"))
    headers = [_tensor_header(cursor) for _ in range(tensor_count)]
    model = GGUF(path, metadata)
    alignment = model.get("general.alignment", int) or _ALIGNMENT
    if not 1 <= alignment <= _MOST_ALIGNMENT:
        raise cursor.corrupt(f"it claims to be aligned to {alignment} bytes")
    start = -(-cursor.at // alignment) * alignment
    everything = np.frombuffer(data, dtype=np.uint8)
    for name, shape, kind, offset in headers:
        if name in model.tensors:
            raise cursor.corrupt(f"it has the tensor '{name[:100]}' twice")
        model.tensors[name] = _tensor(path, everything, name, shape, kind, start + offset)
    if sum(tensor.raw.nbytes for tensor in model.tensors.values()) > len(data):
        raise cursor.corrupt("its tensors overlap")
    return model


def _tensor_header(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.string()
    dimensions = cursor.scalar("I")
    if not 1 <= dimensions <= 4:
        raise cursor.corrupt(f"the tensor '{name[:100]}' claims {dimensions} dimensions")
    shape = tuple(cursor.scalar("Q") for _ in range(dimensions))
    if 0 in shape:
        raise cursor.corrupt(f"the tensor '{name[:100]}' is empty")
    return name, shape[::-1], cursor.scalar("I"), cursor.scalar("Q")


def _tensor(
    path: Path,
    everything: npt.NDArray[np.uint8],
    name: str,
    shape: tuple[int, ...],
    kind: int,
    start: int,
) -> GgufTensor:
    try:
        known = GGMLQuantizationType(kind)
        block, size = GGML_QUANT_SIZES[known]
    except (ValueError, KeyError):
        raise ModelError(
            f"{path} stores the tensor '{name}' in the unknown ggml type {kind}. "
            f"Update the gguf package, or take the model in another quantisation type."
        ) from None
    if shape[-1] % block:
        raise ModelError(
            f"{path} is corrupt: the rows of '{name}' have {shape[-1]} values, "
            f"which {known.name} cannot hold in whole blocks of {block}."
        )
    end = start + math.prod(shape) // block * size
    if end > len(everything):
        raise ModelError(
            f"{path} is truncated: the tensor '{name}' ends at byte {end}, "
            f"and the file has {len(everything)}. Download it again."
        )
    return GgufTensor(name, shape, known, everything[start:end])


class _Cursor:
    """A place in the file's head, moving forward over typed values."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.at = 0
        self._values = self._depth = 0
        """Values of arrays so far, and how many arrays the cursor is in."""

    def corrupt(self, how: str) -> ModelError:
        return ModelError(f"{self.path} is corrupt: {how}. Download it again.")

    def move(self, size: int) -> int:
        start, end = self.at, self.at + size
        if end > len(self.data):
            raise ModelError(
                f"{self.path} is truncated: its head ends beyond byte {len(self.data)}, "
                f"where the file ends. Download it again."
            )
        if end > _MOST_HEAD:
            raise self.corrupt(f"its head has more than {format_bytes(_MOST_HEAD)}")
        self.at = end
        return start

    def scalar(self, code: str) -> Any:
        layout = "<" + code
        return struct.unpack_from(layout, self.data, self.move(struct.calcsize(layout)))[0]

    def count(self, what: str, least: int, most: int) -> int:
        """A number of things to come, each of at least `least` bytes, and at most so many."""
        number: int = self.scalar("Q")
        if number * least > len(self.data) or number > most:
            raise self.corrupt(f"it claims {number} {what}")
        return number

    def string(self) -> str:
        size: int = self.scalar("Q")
        start = self.move(size)
        try:
            return self.data[start : start + size].decode()
        except UnicodeDecodeError:
            raise self.corrupt(f"the text at byte {start} is not UTF-8") from None

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array()
        if kind not in _SCALARS:
            raise self.corrupt(f"unknown metadata type {kind} at byte {self.at}")
        return self.scalar(_SCALARS[kind])

    def array(self) -> list[Any]:
        kind = self.scalar("I")
        if kind in _SCALARS:
            layout = np.dtype("<" + _SCALARS[kind])
            length = self._length(layout.itemsize)
            start = self.move(length * layout.itemsize)
            values: list[Any] = np.frombuffer(self.data, layout, length, start).tolist()
            return values
        length = self._length(8)
        self._depth += 1
        if self._depth > _MOST_NESTED:
            raise self.corrupt(f"it has arrays inside arrays, more than {_MOST_NESTED} deep")
        found = [self.value(kind) for _ in range(length)]
        self._depth -= 1
        return found

    def _length(self, least: int) -> int:
        length = self.count("array values", least, _MOST_VALUES)
        self._values += length
        if self._values > _MOST_VALUES:
            raise self.corrupt(f"it claims more than {_MOST_VALUES} array values")
        return length
