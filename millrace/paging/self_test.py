"""A look at the GPU kernels before they are used: what they give must be what plain MLX operations give.

Tables are shuffled, and pages that no sequence has are full of NaN: a kernel that reads or writes elsewhere
than it should shows it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import mlx.core as mx

from millrace.paging import kernels, plain
from millrace.paging.passes import Run, flat_pass
from millrace.paging.rule import AttentionRule

log = logging.getLogger("millrace.engine")

_LENGTHS = (1, 77, 130, 45)
"""Tokens of the sequences of the trial."""
_COUNTS = (1, 3, 1, 1)
"""How many of them are queried."""
_TOLERANCE = 0.05
"""bfloat16 differs by a hundredth where values are about 1; a wrong key by as much as the values."""


@dataclass(frozen=True)
class HeadShape:
    """What a layer's attention is made of."""

    heads: int
    query_heads: int
    key_size: int
    value_size: int
    dtype: mx.Dtype
    page: int
    window: int | None = None
    sinks: bool = False


def kernels_agree(shape: HeadShape) -> bool:
    """Whether writing and attending by kernels comes to what plain operations come to."""
    try:
        difference = _difference(shape)
    except Exception as error:  # whatever a compiler or a driver raises
        log.warning("the attention kernels cannot be used for %s: %s", shape, error)
        return False
    if difference <= _TOLERANCE:
        return True
    log.warning(
        "the attention kernels are not used for %s: they differ by %.3g from plain operations",
        shape,
        difference,
    )
    return False


def _difference(shape: HeadShape) -> float:
    """The largest difference; infinity where one of the two is not a number."""
    page = shape.page
    counts = [-(-length // page) for length in _LENGTHS]
    order = [1 + (7 * i) % sum(counts) for i in range(sum(counts))]
    if len(set(order)) < len(order):
        order = list(range(sum(counts), 0, -1))
    tables = [[order.pop() for _ in range(count)] for count in counts]
    runs = [
        Run(i, length - count, count)
        for i, (length, count) in enumerate(zip(_LENGTHS, _COUNTS, strict=True))
    ]
    at = flat_pass(runs, [tables], page, tokens=sum(_COUNTS) + 2)
    slots = [n for t, length in zip(tables, _LENGTHS, strict=True) for n in _slots(t, length, page)]
    places = (sum(counts) + 2) * page
    sizes = (shape.key_size, shape.value_size)
    rows = [_noise((len(slots), shape.heads, 1, size), shape.dtype, size) for size in sizes]
    keys, values = (mx.full((places, shape.heads, size), mx.nan, shape.dtype) for size in sizes)
    index = mx.array(slots, mx.int32)
    want = [mx.zeros((places, shape.heads, size), shape.dtype) for size in sizes]
    for pool, row in zip(want, rows, strict=True):
        pool[index] = row[:, :, 0]
    mx.eval(keys, values, rows, want)
    queries = _noise((at.tokens, shape.query_heads, 1, shape.key_size), shape.dtype, 3)
    sinks = mx.zeros((shape.query_heads,), shape.dtype) if shape.sinks else None
    rule = AttentionRule(shape.key_size**-0.5, shape.window, sinks)
    group = at.groups[0]
    chain = kernels.write(keys, values, rows[0], rows[1], index, mx.zeros((1,), mx.int32))
    found, _ = kernels.attend(
        queries, keys, values, group.table, at.sequences, at.places, page, rule, chain
    )
    first, second = (pool.reshape(-1, page, *pool.shape[1:]) for pool in want)
    expected = plain.attend(queries[:, :, 0], first, second, at, group, rule)
    real = at.tokens - at.padding
    error = mx.abs(found[:real, :, 0].astype(mx.float32) - expected[:real].astype(mx.float32))
    largest = float(mx.max(error).item())
    return largest if largest == largest else float("inf")


def _slots(table: list[int], length: int, page: int) -> list[int]:
    return [table[n // page] * page + n % page for n in range(length)]


def _noise(shape: tuple[int, ...], dtype: mx.Dtype, seed: int) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)
