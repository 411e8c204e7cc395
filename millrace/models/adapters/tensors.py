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
from typing import Any

import numpy as np
import numpy.typing as npt

from millrace.errors import AdapterError

Floats = npt.NDArray[np.float32]
_MOST_HEADER = 16 << 20
_PIECE = 1 << 22
_WIDTHS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


def read_bytes(file: Path, most: int, digest: Any) -> bytes:
    """All of a file of at most so many bytes; the digest is told each of them, and how many there are."""
    try:
        with file.open("rb") as opened:
            size = os.fstat(opened.fileno()).st_size
            if size > most:
                raise AdapterError(
                    f"{file} has {size / 2**20:.1f} MiB, and adapters may take {most / 2**20:.1f} MiB "
                    "in all. Raise --lora-memory, or use one of a lower rank."
                )
            data = bytearray()
            # A file that grows while it is read is not read for ever.
            while len(data) <= most and (piece := opened.read(_PIECE)):
                data += piece
    except OSError as error:
        raise AdapterError(f"{file} cannot be read: {error.strerror}.") from error
    digest.update(f"{file.name} {len(data)}\n".encode())
    digest.update(data)
    return bytes(data)


def new_digest() -> Any:
    return hashlib.sha256()


def arrays(data: bytes, file: Path) -> dict[str, Floats]:
    """The arrays by name, widened to float32."""
    header, body = _header(data, file)
    return {name: _array(name, entry, body, file) for name, entry in header.items()}


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


def _array(name: str, entry: Any, body: memoryview, file: Path) -> Floats:
    try:
        kind, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        numbers = (*shape, begin, end)
    except (TypeError, KeyError, ValueError) as error:
        raise _broken(file, f"its header says nothing sensible of {name}") from error
    if kind not in _WIDTHS:
        raise AdapterError(f"{file}: {name} is {kind}; adapters are F32, F16 or BF16.")
    whole = all(type(n) is int and 0 <= n < 2**48 for n in numbers)
    if not whole or end > len(body) or end - begin != math.prod(shape) * _WIDTHS[kind]:
        raise _broken(file, f"{name} does not lie where its header says")
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


def _broken(file: Path, why: str) -> AdapterError:
    return AdapterError(f"{file} is no whole safetensors file: {why}. Fetch the adapter again.")
