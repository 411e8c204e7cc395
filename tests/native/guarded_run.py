"""Runs models whose every array ends, or begins, where the next byte may not be touched: what reads or
writes beside its memory ends the process. So it is a process of its own."""

from __future__ import annotations

import ctypes
import faulthandler
import mmap
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
from native_models import Array, Kind, random_tokens, run

from millrace.native import buffers, packing
from millrace.native import model as native_model
from millrace.native.attention import BLOCK
from millrace.native.items import NativeRun
from millrace.native.memory import NativePools
from millrace.native.model import NativeModel
from millrace.native.packing import PackedMatrix

_PAGE = mmap.PAGESIZE
_libc = ctypes.CDLL(None, use_errno=True)
_kept: list[mmap.mmap] = []
SIDE = "end"


def guarded(shape: tuple[int, ...], dtype: Any) -> Array:
    """Zeros between two pages that may not be touched, close to one of them."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    pages = max(1, -(-size // _PAGE))
    memory = mmap.mmap(-1, (pages + 2) * _PAGE)
    _kept.append(memory)
    whole = np.frombuffer(memory, np.uint8)
    for page in (0, pages + 1):
        address = ctypes.c_void_p(whole.ctypes.data + page * _PAGE)
        assert _libc.mprotect(address, ctypes.c_size_t(_PAGE), 0) == 0
    start = _PAGE if SIDE == "begin" else (pages + 1) * _PAGE - size
    found: Array = whole[start : start + size].view(dtype).reshape(shape)
    return found


def copied(value: Any) -> Any:
    """A plan whose arrays are guarded."""
    if isinstance(value, np.ndarray):
        twin = guarded(value.shape, value.dtype)
        twin[:] = value
        return twin
    if isinstance(value, list):
        return [copied(part) for part in value]
    if is_dataclass(value) and not isinstance(value, type):
        if isinstance(value, PackedMatrix):
            bias = None if value.bias is None else copied(value.bias)
            return replace(value, data=copied(value.data), bias=bias)
        return replace(value, **{f.name: copied(getattr(value, f.name)) for f in fields(value)})
    return value


class GuardedPools(NativePools):
    """Each layer's pages in guarded memory that holds no numbers."""

    def _region(self, pages: int) -> Any:
        memory = guarded((pages * self.page_bytes,), np.uint8)
        memory[:] = 255
        return memory


def check(kind: Kind, threads: int, width: int, passes: list[tuple[int, list[int]]]) -> None:
    """Passes are the tokens that each sequence runs, and how many of these hold."""
    plain = kind.native(1)
    rows = len(passes[0][1])
    tokens = [random_tokens(width, seed) for seed in range(rows)]
    alone = [run(plain, row) for row in tokens]
    plan = copied(plain._plan)
    model = NativeModel(plan, threads, plain.args)
    each = -(-width // BLOCK)
    # The last sequence has the first pages, and the very last page is of the first one.
    tables = [[(rows - 1 - row) * each + page for page in range(each)] for row in range(rows)]
    pools = GuardedPools(plan, rows * each)
    places, ends = [0] * rows, [0] * rows
    for count, held in passes:
        runs = [NativeRun(place, count) for place in places]
        ends = [max(end, at + count) for end, at in zip(ends, places, strict=True)]
        inputs = [i for t, at in zip(tokens, places, strict=True) for i in t[at : at + count]]
        found = model.run_pages(inputs, runs, pools, tables, wanted=range(len(inputs)))
        logits = np.array(found).reshape(rows, count, -1)
        for row, own, at in zip(logits, alone, places, strict=True):
            assert row.tobytes() == own[at : at + count].tobytes()
        places = [at + good for at, good in zip(places, held, strict=True)]
    assert max(ends) == width
    for memory in (*pools.keys, *pools.values):
        for table, end in zip(tables, ends, strict=True):
            whole = memory[table].swapaxes(0, 1).reshape(plan.heads, -1, plan.head_size)
            assert np.isfinite(whole[:, :end]).all()
            assert np.isnan(whole[:, end:]).all()


def check_kinds() -> None:
    window = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 33}
    check(Kind(bits=4, more=window), 1, 293, [(150, [150]), (1, [1]), (141, [141]), (1, [1])])
    check(Kind(bits=8, group=32), 2, 61, [(40, [40, 9]), (6, [6, 1]), (9, [9, 9]), (6, [6, 6])])
    check(Kind(heads=(8, 1), head_size=128), 2, 133, [(131, [131] * 3), (1, [1] * 3), (1, [1] * 3)])
    check(Kind(heads=(3, 1)), 2, 128, [(120, [120, 120]), (1, [1, 1]), (7, [7, 7])])
    check(Kind(heads=(3, 1)), 2, 256, [(255, [255]), (1, [1])])
    check(Kind("qwen3", heads=(7, 1)), 3, 141, [(13, [13]), (127, [127]), (1, [1])])
    check(Kind("qwen2", hidden=256, layers=1), 2, 17, [(16, [16] * 9), (1, [1] * 9)])
    check(Kind(heads=(96, 1), layers=1), 1, 18, [(7, [7]), (10, [10]), (1, [1])])
    gemma = {"sliding_window": 20, "sliding_window_pattern": 2, "query_pre_attn_scalar": 64}
    check(Kind("gemma3_text", (4, 1), 256, more=gemma), 2, 130, [(129, [129]), (1, [1])])


def main() -> None:
    global SIDE
    faulthandler.enable()
    tables = native_model.PassTables, native_model.Buffers
    assert tables == (buffers.PassTables, buffers.Buffers)
    buffers.aligned = guarded  # type: ignore[assignment]
    assert packing.aligned is not guarded
    for side in ("end", "begin"):
        SIDE = side
        check_kinds()
    print("no kernel left its memory")


if __name__ == "__main__":
    main()
