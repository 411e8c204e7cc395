"""Attention over pages on a GPU: CUDA and Metal, from one text (`kernel_text.py`)."""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.core as mx

from millrace.paging import kernel_text as text
from millrace.paging.rule import AttentionRule

WARPS = 4
_MOST_ELEMENTS = 512
"""Elements of the query heads of a block, so that a thread keeps its part of them in registers."""
_BLOCKS = 512
"""Blocks that keep a GPU busy; with fewer, the keys of a sequence are split over several."""
_LEAST_SPLIT = 128
"""Keys that a split has at least: fewer take less time than putting the parts together."""
_MOST_SPLITS = 32

_WRITE_INPUTS = ("pool_keys", "pool_values", "keys", "values", "slots", "chain")
_ATTEND_INPUTS = (
    "queries",
    "pool_keys",
    "pool_values",
    "table",
    "sequence",
    "place",
    "rule",
    "sinks",
    "chain",
)
_ATTEND_OUTPUTS = ("out", "parts", "bounds", "next")


@cache
def _kernel(name: str, inputs: tuple[str, ...], outputs: tuple[str, ...], source: str) -> Any:
    metal = mx.metal.is_available()
    make = mx.fast.metal_kernel if metal else mx.fast.cuda_kernel
    prelude = text.METAL_PRELUDE if metal else text.CUDA_PRELUDE
    return make(
        name=name,
        input_names=list(inputs),
        output_names=list(outputs),
        source=source,
        header=prelude + text.PACK,
        ensure_row_contiguous=False,
    )


def shapes_cost() -> bool:
    """Whether MLX's own attention makes a plan for every new shape, as it does on CUDA."""
    return not mx.metal.is_available()


def fits(key_size: int, value_size: int, dtype: mx.Dtype) -> bool:
    """Whether the kernels take heads of these sizes."""
    sizes = all(size % 8 == 0 and 32 <= size <= 256 for size in (key_size, value_size))
    return sizes and dtype in (mx.bfloat16, mx.float16, mx.float32)


def write(
    pool_keys: mx.array,
    pool_values: mx.array,
    keys: mx.array,
    values: mx.array,
    slots: mx.array,
    chain: mx.array,
) -> mx.array:
    """Put keys and values, [rows, heads, columns, size], into their slots of pools; returns the chain."""
    rows, heads, columns, size = keys.shape
    kernel = _kernel("millrace_write", _WRITE_INPUTS, ("done",), text.WRITE)
    (done,) = kernel(
        inputs=[pool_keys, pool_values, keys, values, slots, chain],
        template=[("T", keys.dtype), ("HK", heads), ("D", size), ("DV", values.shape[3])],
        grid=(rows * columns * 32, heads, 1),
        threadgroup=(32, 1, 1),
        output_shapes=[(1,)],
        output_dtypes=[mx.int32],
    )
    return done  # type: ignore[no-any-return]


def splits_for(blocks: int, keys: int) -> int:
    """Over how many blocks the keys of a sequence are split: a power of two, so that shapes recur."""
    splits = 1
    while splits < _MOST_SPLITS and blocks * splits < _BLOCKS and keys >= 2 * splits * _LEAST_SPLIT:
        splits *= 2
    return splits


def attend(
    queries: mx.array,
    pool_keys: mx.array,
    pool_values: mx.array,
    table: mx.array,
    sequence: mx.array,
    place: mx.array,
    page: int,
    rule: AttentionRule,
    chain: mx.array,
) -> tuple[mx.array, mx.array]:
    """Attention of queries, [rows, heads, columns, size], over pools [slots, heads, size]; and the chain.

    `sequence` is each token's row of the `table`, `place` its own place in the sequence.
    """
    rows, heads, columns, size = queries.shape
    tokens = rows * columns
    shared = heads // pool_keys.shape[1]
    value_size = pool_values.shape[2]
    together = _heads_together(shared, max(size, value_size))
    seen = table.shape[1] * page
    splits = splits_for(tokens * heads // together, min(seen, rule.window) if rule.window else seen)
    whole = splits == 1
    kernel = _kernel("millrace_attend", _ATTEND_INPUTS, _ATTEND_OUTPUTS, text.ATTEND)
    sinks = rule.sinks
    out, parts, bounds, after = kernel(
        inputs=[
            queries,
            pool_keys,
            pool_values,
            table,
            sequence,
            place,
            rule.numbers,
            rule.numbers if sinks is None else sinks,
            chain,
        ],
        template=[
            ("T", queries.dtype),
            ("HK", pool_keys.shape[1]),
            ("G", shared),
            ("GB", together),
            ("D", size),
            ("DV", value_size),
            ("PAGE", page),
            ("WINDOW", rule.window or 0),
            ("WARPS", WARPS),
            ("SINKS", sinks is not None),
            ("SPLIT", not whole),
        ],
        grid=(tokens * WARPS * 32, heads // together, splits),
        threadgroup=(WARPS * 32, 1, 1),
        output_shapes=[
            (rows, heads, columns, value_size) if whole else (1,),
            (1,) if whole else (tokens * heads, splits, value_size),
            (1,) if whole else (tokens * heads, splits, 2),
            (1,),
        ],
        output_dtypes=[queries.dtype, mx.float32, mx.float32, mx.int32],
    )
    if not whole:
        out = _combine(parts, bounds, (rows, heads, columns, value_size), queries.dtype)
    return out, after


def _combine(
    parts: mx.array, bounds: mx.array, shape: tuple[int, ...], dtype: mx.Dtype
) -> mx.array:
    kernel = _kernel("millrace_combine", ("parts", "bounds"), ("out",), text.COMBINE)
    (out,) = kernel(
        inputs=[parts, bounds],
        template=[("T", dtype), ("DV", parts.shape[2])],
        grid=(parts.shape[0] * 32, 1, 1),
        threadgroup=(32, 1, 1),
        output_shapes=[shape],
        output_dtypes=[dtype],
    )
    return out  # type: ignore[no-any-return]


@cache
def _heads_together(shared: int, size: int) -> int:
    """How many of the query heads that share a key head one block computes."""
    most = max(1, _MOST_ELEMENTS // size)
    return max(n for n in range(1, shared + 1) if shared % n == 0 and n <= most)
