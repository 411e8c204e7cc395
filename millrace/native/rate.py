"""What the kernels make of this machine: its vectors, and weights a second."""

from __future__ import annotations

import time

import numpy as np

from millrace.native import library, stages
from millrace.native.compile import processor
from millrace.native.formats import Format
from millrace.native.packing import aligned
from millrace.native.pool import Pool

_OUTPUTS, _INPUTS = 4096, 4096


def measure(threads: int, seconds: float = 0.5) -> float:
    """Four-bit weights a second: one row times a matrix of 16 million, for a while; the best."""
    form = Format("u4", 32, "f16", biased=True)
    groups = _INPUTS // form.group
    data = aligned((_OUTPUTS // 16, groups, form.group_bytes), np.uint8)
    x, sums = aligned((_INPUTS,), np.float32), aligned((groups,), np.float32)
    out = aligned((_OUTPUTS,), np.float32)
    fields = {
        "weights": data.ctypes.data,
        "block_bytes": groups * form.group_bytes,
        "groups": groups,
        "x": x.ctypes.data,
        "sums": sums.ctypes.data,
        "out": out.ctypes.data,
        "rows": 1,
    }
    function = library.of_format(form).address["streamed1"]
    units = _OUTPUTS // 16 // library.streamed_blocks(1)
    program = np.zeros((1, len(stages.HEAD) + len(stages.PRODUCT)), np.int64)
    program[0, : len(stages.HEAD)] = function, units, 0, 0, 1
    program[0, len(stages.HEAD) :] = [fields.get(name, 0) for name in stages.PRODUCT]
    pool = Pool(threads)
    best, until = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < until:
        begin = time.perf_counter()
        pool.run(program)
        best = min(best, time.perf_counter() - begin)
    return _OUTPUTS * _INPUTS / best


def vectors() -> str:
    """The widest vectors that the processor has."""
    features = processor()[1].split(",")
    for feature, name in (("+avx512f", "AVX-512"), ("+avx2", "AVX2"), ("+neon", "NEON")):
        if feature in features:
            return name
    return "narrow"


def name() -> str:
    """What LLVM calls the processor."""
    return processor()[0]
