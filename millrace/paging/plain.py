"""Attention over pages in plain MLX operations: pages are gathered, then MLX's own attention runs.

It runs on every device, is what the kernels are compared with, and serves what has no kernel. Sequences
with one token are gathered together; a run of several tokens is one call.
"""

from __future__ import annotations

import mlx.core as mx

from millrace.paging.passes import PageGroup, PagePass, Run
from millrace.paging.pool import TRASH
from millrace.paging.rule import AttentionRule

RECURRING_KEYS = 256
"""Queries and keys are padded to multiples of this where shapes are to recur: a new one costs a GPU with
MLX's CUDA back-end about as much as a step."""


def attend(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    at: PagePass,
    group: PageGroup,
    rule: AttentionRule,
) -> mx.array:
    """[tokens, query heads, size] of a pass's tokens over pools shaped [pages, page, heads, size]."""
    parts: list[mx.array] = []
    begin = 0
    runs = [*at.runs]
    while runs:
        singles = _singles(runs)
        if singles:
            part = queries[begin : begin + len(singles)]
            parts.append(_rows(part, keys, values, group, singles, rule))
            begin, runs = begin + len(singles), runs[len(singles) :]
            continue
        run = runs.pop(0)
        parts.append(attend_run(queries[begin : begin + run.count], keys, values, group, run, rule))
        begin += run.count
    if at.padding:
        parts.append(mx.zeros((at.padding, queries.shape[1], values.shape[-1]), queries.dtype))
    return parts[0] if len(parts) == 1 else mx.concatenate(parts)


def _singles(runs: list[Run]) -> list[Run]:
    count = next((i for i, run in enumerate(runs) if run.count > 1), len(runs))
    return runs[:count]


def _rows(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    group: PageGroup,
    runs: list[Run],
    rule: AttentionRule,
) -> mx.array:
    """One token of each of several sequences."""
    page = keys.shape[1]
    lengths = mx.array([run.first for run in runs], mx.int32)
    first = 0
    if rule.window is not None:
        first = max(0, min(run.first for run in runs) - rule.window + 1) // page
    last = max(run.first for run in runs) // page + 1
    pages = group.table[mx.array([run.sequence for run in runs], mx.int32)][:, first:last]
    places = first * page + mx.arange((last - first) * page, dtype=mx.int32)
    mask = places <= lengths[:, None]
    if rule.window is not None:
        mask = mask & (places > lengths[:, None] - rule.window)
    found = mx.fast.scaled_dot_product_attention(
        queries[:, :, None],
        only_seen(_gather(keys, pages), mask),
        only_seen(_gather(values, pages), mask),
        scale=rule.scale,
        mask=mask[:, None, None],
        sinks=rule.sinks,
    )
    return found[:, :, 0]


def attend_run(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    group: PageGroup,
    run: Run,
    rule: AttentionRule,
    *,
    recurring: bool = False,
) -> mx.array:
    """Several tokens of one sequence. With `recurring`, others run along whose results are dropped, so that
    the shapes of queries and keys are of a small set."""
    page = keys.shape[1]
    end = run.first + run.count
    first = 0 if rule.window is None else max(0, run.first - rule.window + 1) // page
    begin = first * page
    sees_all = rule.window is None or end - begin <= rule.window
    queries = queries.transpose(1, 0, 2)[None]
    before = 0
    if recurring and sees_all and not begin:
        # Masks are aligned at the end, where queries and keys get equally many.
        before, behind = run.first % RECURRING_KEYS, -end % RECURRING_KEYS
        queries = mx.pad(queries, ((0, 0), (0, 0), (before, behind), (0, 0)))
        seen = mx.arange(end + behind, dtype=mx.int32)[None] < end
        table = mx.pad(group.table[run.sequence], (0, -(-behind // page)), constant_values=TRASH)
        pages = table[None, : -(-(end + behind) // page)]
        k, v = (only_seen(_gather(p, pages)[:, :, : end + behind], seen) for p in (keys, values))
    else:
        pages = group.table[run.sequence, first : -(-end // page)][None]
        k, v = (_gather(pool, pages)[:, :, : end - begin] for pool in (keys, values))
    mask: mx.array | str = "causal"
    if not sees_all:
        assert rule.window is not None
        query = mx.arange(run.first, end, dtype=mx.int32)[:, None]
        place = mx.arange(begin, end, dtype=mx.int32)
        mask = (place <= query) & (place > query - rule.window)
    found = mx.fast.scaled_dot_product_attention(
        queries, k, v, scale=rule.scale, mask=mask, sinks=rule.sinks
    )
    return found[0, :, before : before + run.count].transpose(1, 0, 2)


def attend_masked(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    group: PageGroup,
    run: Run,
    rule: AttentionRule,
    mask: mx.array,
) -> mx.array:
    """[1, query heads, tokens, size] of a run, of whose last keys a mask says which are seen."""
    page = keys.shape[1]
    end = run.first + run.count
    width = min(mask.shape[-1], end)
    if rule.window is not None:
        width = min(width, run.count + rule.window - 1)
    first = (end - width) // page
    begin = first * page
    pages = group.table[run.sequence, first : -(-end // page)][None]
    k, v = (
        _gather(pool, pages)[:, :, end - width - begin : end - begin] for pool in (keys, values)
    )
    found: mx.array = mx.fast.scaled_dot_product_attention(
        queries, k, v, scale=rule.scale, mask=mask[..., -width:], sinks=rule.sinks
    )
    return found


def only_seen(gathered: mx.array, seen: mx.array) -> mx.array:
    """Keys or values, [rows, heads, keys, size], with zeros where the mask `seen`, [rows, keys], is false.
    Other sequences' values may be there; a weight of zero times inf or NaN is NaN."""
    return mx.where(seen[:, None, :, None], gathered, mx.zeros((), gathered.dtype))


def _gather(pool: mx.array, pages: mx.array) -> mx.array:
    """[rows, heads, keys, size] of tables shaped [rows, pages]."""
    found = pool[pages]
    rows, count, page, heads, size = found.shape
    return found.reshape(rows, count * page, heads, size).transpose(0, 2, 1, 3)
