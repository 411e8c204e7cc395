"""One payload as one file in the safetensors format, with a checksum over all of its bytes.

A file appears under its name only when it is whole and on the disk; a file whose size or checksum
is not the expected one is never turned into arrays.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from millrace.cache.payload import Payload

Array = npt.NDArray[np.generic]

SUFFIX = ".safetensors"
TEMPORARY = ".tmp"

_DTYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype("bool"),
    "U8": np.dtype("uint8"),
    "I8": np.dtype("int8"),
    "U16": np.dtype("uint16"),
    "I16": np.dtype("int16"),
    "U32": np.dtype("uint32"),
    "I32": np.dtype("int32"),
    "U64": np.dtype("uint64"),
    "I64": np.dtype("int64"),
    "F16": np.dtype("float16"),
    "F32": np.dtype("float32"),
    "F64": np.dtype("float64"),
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_PIECE = 1 << 20
"""Written and checksummed together, while it is in the processor's cache."""
_BLOCK = 4096


class Damaged(Exception):
    """A file that is not what was written."""


def on_disk(size: int) -> int:
    """Bytes that a file of this size takes from the volume."""
    return -(-size // _BLOCK) * _BLOCK


def head(payload: Payload) -> bytes:
    """The first bytes of the file. Raises ValueError for a type that cannot be stored."""
    entries: dict[str, Any] = {"__metadata__": {"meta": payload.meta}}
    offset = 0
    spans = {}
    for name, array in _ordered(payload):
        spans[name] = [offset, offset + array.nbytes]
        offset += array.nbytes
    for name, array in payload.arrays.items():
        if array.dtype not in _NAMES or name == "__metadata__":
            raise ValueError(f"the array '{name}' of type {array.dtype} cannot be stored")
        entries[name] = {
            "dtype": _NAMES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": spans[name],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write(path: Path, start: bytes, payload: Payload, *, sync: bool) -> int:
    """Write the payload, whose head is `start`, and return the checksum of the file."""
    temporary = path.with_suffix(TEMPORARY)
    crc = 0
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            for piece in _pieces(start, payload):
                crc = zlib.crc32(piece, crc)
                _write_all(fd, piece)
            if sync:
                os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(temporary, path)
    except BaseException:
        remove(temporary)
        raise
    return crc


def read(path: Path, size: int, crc: int) -> Payload:
    """The payload of a file. Raises Damaged if it is not the file that was written."""
    with path.open("rb", buffering=0) as file:
        if os.fstat(file.fileno()).st_size != size:
            raise Damaged(f"{path.name} has not the size it was written with")
        data = np.empty(size, np.uint8)
        view = data.data
        at = found = 0
        while at < size:
            count = file.readinto(view[at : at + _PIECE]) or 0
            if not count:
                raise Damaged(f"{path.name} ends early")
            found = zlib.crc32(view[at : at + count], found)
            at += count
    if found != crc:
        raise Damaged(f"{path.name} has not the checksum it was written with")
    return _parse(data)


def cut(payload: Payload, lo: int, hi: int) -> Payload:
    """Positions lo to hi of every array, in memory of its own."""
    if all(a.shape[2] == hi - lo for a in payload.arrays.values()):
        return payload
    return Payload(
        {n: np.ascontiguousarray(a[:, :, lo:hi]) for n, a in payload.arrays.items()}, payload.meta
    )


def remove(path: Path) -> bool:
    """Whether the file is gone."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def sync_folder(folder: Path) -> None:
    """Make renames durable, where the system lets a folder be opened."""
    try:
        fd = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(fd)
    except OSError:
        pass
    finally:
        os.close(fd)


def _ordered(payload: Payload) -> list[tuple[str, Array]]:
    # Wide elements first keeps every array aligned without gaps, which the format forbids.
    return sorted(payload.arrays.items(), key=lambda item: -item[1].dtype.itemsize)


def _pieces(start: bytes, payload: Payload) -> Iterator[memoryview]:
    yield memoryview(start)
    for _, array in _ordered(payload):
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        for at in range(0, len(flat), _PIECE):
            yield flat[at : at + _PIECE]


def _write_all(fd: int, piece: memoryview) -> None:
    while piece:
        piece = piece[os.write(fd, piece) :]


def _parse(data: npt.NDArray[np.uint8]) -> Payload:
    end = 8 + int.from_bytes(data[:8].tobytes(), "little")
    entries = json.loads(data[8:end].tobytes())
    meta = entries.pop("__metadata__")["meta"]
    arrays: dict[str, Array] = {}
    for name, entry in entries.items():
        lo, hi = entry["data_offsets"]
        raw = data[end + lo : end + hi]
        arrays[name] = raw.view(_DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return Payload(arrays, meta)
