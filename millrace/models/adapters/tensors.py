"""Arrays of a safetensors file as numpy's floats, and the digest of what was read.

The file is somebody else's: every number in its header is checked before it is used.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from millrace.errors import AdapterError, AdapterUnreadable
from millrace.models.files import open_regular
from millrace.sizes import format_bytes

Floats = npt.NDArray[np.float32]
_MOST_HEADER = 16 << 20
_PIECE = 1 << 22
_MOST_ARRAYS = 1 << 16
_MOST_DIMENSIONS = 8
_LONGEST_NAME = 160
"""Names are compared with patterns of the adapter's own, which takes longer the longer they are."""
_HEAD = 9
"""Bytes by which a safetensors file is recognised: the length of its header, and the brace of that."""
_WIDTHS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


class _Place(NamedTuple):
    """Where an array lies, checked."""

    kind: str
    shape: list[int]
    begin: int
    end: int


def read_bytes(file: Path, most: int, digest: Any, remedy: str = "") -> bytes:
    """All of a file of at most so many bytes; the digest is told each of them, and how many there are."""
    try:
        with open_regular(file) as opened:
            size = os.fstat(opened.fileno()).st_size
            if size > most:
                if recognised := file.suffix == ".safetensors":
                    _check_large(opened.read(_HEAD), file)
                kind = AdapterError if recognised else AdapterUnreadable
                raise kind(
                    f"{file} has {format_bytes(size)}, and at most {format_bytes(most)} of it are "
                    f"read{remedy}."
                )
            data = bytearray()
            # A file that grows while it is read is not read for ever.
            while len(data) <= most and (piece := opened.read(_PIECE)):
                data += piece
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise AdapterUnreadable(f"{file} cannot be read: {reason}.") from error
    digest.update(f"{file.name} {len(data)}\n".encode())
    digest.update(data)
    return bytes(data)


def _check_large(begin: bytes, file: Path) -> None:
    """Raise unless a file that is too large begins as safetensors do."""
    if int.from_bytes(begin[:8], "little") > _MOST_HEADER or begin[8:] != b"{":
        raise _broken(file, "its header does not fit into it")


def new_digest() -> Any:
    return hashlib.sha256()


def arrays(data: bytes, file: Path) -> dict[str, Floats]:
    """The arrays by name, widened to float32."""
    header, body = _header(data, file)
    if len(header) > _MOST_ARRAYS:
        raise _broken(file, f"it claims {len(header)} arrays, and at most {_MOST_ARRAYS} are read")
    if any(len(name) > _LONGEST_NAME for name in header):
        raise _broken(file, f"it has a name of more than {_LONGEST_NAME} characters")
    places = {name: _placed(name, entry, body, file) for name, entry in header.items()}
    if sum(end - begin for _, _, begin, end in places.values()) > len(body):
        # Each array becomes memory of its own, however often the file's bytes are counted.
        raise _broken(file, "its arrays overlap")
    return {name: _array(name, place, body, file) for name, place in places.items()}


def _header(data: bytes, file: Path) -> tuple[Mapping[str, Any], memoryview]:
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > min(_MOST_HEADER, len(data) - 8):
        raise _broken(file, "its header does not fit into it")
    try:
        header = json.loads(data[8 : 8 + length])
    except (ValueError, RecursionError) as error:
        raise _broken(file, "its header is not JSON") from error
    if not isinstance(header, dict):
        raise _broken(file, "its header is no object")
    header.pop("__metadata__", None)
    return header, memoryview(data)[8 + length :]


def _placed(name: str, entry: Any, body: memoryview, file: Path) -> _Place:
    try:
        kind, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        numbers = (*shape, begin, end)
    except (TypeError, KeyError, ValueError) as error:
        raise _broken(file, f"its header says nothing sensible of {name}") from error
    if not isinstance(kind, str) or kind not in _WIDTHS:
        raise AdapterError(f"{file}: {name} is {str(kind)[:50]}; adapters are F32, F16 or BF16.")
    whole = all(type(n) is int and 0 <= n < 2**48 for n in numbers)
    fits = whole and len(shape) <= _MOST_DIMENSIONS and end <= len(body)
    if not fits or end - begin != math.prod(shape) * _WIDTHS[kind]:
        raise _broken(file, f"{name} does not lie where its header says")
    return _Place(kind, shape, begin, end)


def _array(name: str, place: _Place, body: memoryview, file: Path) -> Floats:
    kind, shape, begin, end = place
    raw = body[begin:end]
    if kind == "BF16":
        values = (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32)
    else:
        given = np.frombuffer(raw, {"F64": "<f8", "F32": "<f4", "F16": "<f2"}[kind])
        with np.errstate(over="ignore"):
            values = given.astype(np.float32)
    if not np.isfinite(values).all():
        raise AdapterError(f"{file}: {name} holds values that are not finite.")
    return values.reshape(shape)


def _broken(file: Path, why: str) -> AdapterUnreadable:
    return AdapterUnreadable(
        f"{file} is no whole safetensors file: {why}. Fetch the adapter again."
    )
