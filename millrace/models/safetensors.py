"""The heads of safetensors files: names, types and shapes of tensors, each number checked.

MLX trusts what a head says, and nothing but the engine's process would pay for it: what does not lie
within the file, or is not of the format at all, is refused here, before an engine is started.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import NamedTuple

import msgspec

from millrace.errors import ModelError
from millrace.models.files import open_regular

MOST_HEAD = 32 << 20
"""Bytes of a head; that of 100,000 tensors has about 13 MB."""
_MOST_DIMENSIONS = 16
_WIDTHS = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1,
    "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1, "C64": 8, "F8_E4M3": 1, "F8_E5M2": 1,
    "F8_E8M0": 1,
}  # fmt: skip


class TensorHead(NamedTuple):
    name: str
    dtype: str
    shape: list[int]


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def heads(file: Path) -> list[TensorHead]:
    """The tensors of a file; raises ModelError where its head is not sound."""
    try:
        with open_regular(file) as opened:
            whole = os.fstat(opened.fileno()).st_size
            start = opened.read(8)
            size = int.from_bytes(start, "little")
            if len(start) < 8 or size > whole - 8:
                raise ValueError("its head is cut short")
            if size > MOST_HEAD:
                raise ValueError(f"its head has {size} bytes, and at most {MOST_HEAD} are read")
            raw = msgspec.json.decode(opened.read(size), type=dict[str, msgspec.Raw])
        return _checked(raw, whole - 8 - size)
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror or error}.") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(
            f"{file} is not a sound safetensors file: {error}. Fetch the model again."
        ) from error


def _checked(raw: dict[str, msgspec.Raw], body: int) -> list[TensorHead]:
    if (notes := raw.pop("__metadata__", None)) is not None:
        msgspec.json.decode(notes, type=dict[str, str] | None)
    found, total = [], 0
    for name, given in raw.items():
        try:
            entry = msgspec.json.decode(given, type=_Entry)
        except ValueError as error:
            raise ValueError(f"{_named(name)}: {error}") from error
        begin, end = entry.data_offsets
        if not 0 <= begin <= end <= body:
            raise ValueError(f"{_named(name)} lies at bytes {begin} to {end} of {body}")
        if len(entry.shape) > _MOST_DIMENSIONS or any(not 0 <= n < 1 << 48 for n in entry.shape):
            raise ValueError(f"{_named(name)} has an impossible shape")
        width = _WIDTHS.get(entry.dtype)
        if width is not None and math.prod(entry.shape) * width != end - begin:
            raise ValueError(
                f"{_named(name)} has {end - begin} bytes, which its shape and type do not give"
            )
        total += end - begin
        found.append(TensorHead(name, entry.dtype, entry.shape))
    if total > body:
        raise ValueError("its tensors overlap")
    return found


def _named(name: str) -> str:
    return f"the tensor '{name[:200]}'"
