"""Sequences in pages: runs of any lengths in one pass have the bits that each has alone."""

from __future__ import annotations

import random

import mlx.core as mx
import numpy as np
import pytest

pytest.importorskip("llvmlite")

from native_models import Kind, random_tokens, run

from millrace.native.attention import BLOCK
from millrace.native.items import NativeRun
from millrace.paging.pool import PagePool
from millrace.paging.table import PageTable

KINDS = {
    "quantised": Kind(bits=4, dtype=mx.float16),
    "with windows": Kind(
        heads=(7, 1),
        more={"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 40},
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_runs_on_pages_have_the_bits_they_have_alone(kind: str) -> None:
    model = KINDS[kind].native()
    draw = random.Random(4)
    rows = [random_tokens(300, seed) for seed in range(5)]
    alone = [run(model, row) for row in rows]
    pool, pools = PagePool(24), model.pools(24)
    for keys in (*pools.keys, *pools.values):
        keys[:] = np.nan
    pool.share(pool.take(3))  # so that pages are not in the order of their tokens
    tables = [PageTable(pool, BLOCK) for _ in rows]
    while any(table.length < 300 for table in tables):
        chosen = [n for n in range(5) if tables[n].length < 300 and draw.random() < 0.8]
        if not chosen:
            continue
        counts = [min(draw.choice((1, 1, 5, 90)), 300 - tables[n].length) for n in chosen]
        runs, tokens, wanted, want = [], [], [], []
        for n, count in zip(chosen, counts, strict=True):
            first = tables[n].length
            tables[n].extend(count)
            runs.append(NativeRun(first, count))
            tokens += list(rows[n][first : first + count])
            wanted.append(len(tokens) - 1)
            want.append(alone[n][first + count - 1])
        pages = [tables[n].pages for n in chosen]
        logits = np.array(model.run_pages(tokens, runs, pools, pages, wanted=wanted))
        for found, expected in zip(logits, want, strict=True):
            assert found.tobytes() == expected.tobytes()


def test_a_pass_without_wanted_tokens_gives_no_logits() -> None:
    model = KINDS["quantised"].native()
    pools = model.pools(2)
    assert model.run_pages([1, 2], [NativeRun(0, 2)], pools, [[1]], wanted=[]) is None


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_a_peek_sees_the_queries_of_its_token_and_leaves_the_pass_as_it_is(kind: str) -> None:
    """Keys of the same token: what it looks for in layers that look at all keys, whatever runs between."""
    more = {"sliding_window": 20, "sliding_window_pattern": 2, "query_pre_attn_scalar": 64}
    model = Kind(kind, heads=(4, 1), more=more if kind == "gemma3_text" else {}).native()
    pools, tokens = model.pools(4), random_tokens(140)
    alone = run(model, tokens)
    model.run_pages(tokens[:139], [NativeRun(0, 139)], pools, [[1, 2]], wanted=[])
    found = []
    for peek in (True, False, True):
        logits = model.run_pages(
            tokens[139:], [NativeRun(139, 1)], pools, [[1, 2]], wanted=[0], peek=peek
        )
        assert np.array(logits)[0].tobytes() == alone[139].tobytes()
        if peek:
            found.append(model.queries())
        else:
            # A pass of others has no part in what was seen.
            model.run_pages([3, 4], [NativeRun(0, 2)], pools, [[3]], wanted=[0, 1])
            found.append(model.queries())
    whole = [layer.window == 0 for layer in model.layers]
    assert any(whole) and all(whole) == (kind == "llama")
    for asked in found:
        for queries, first, seen in zip(asked, found[0], whole, strict=True):
            assert (queries is not None) == seen
            if queries is not None and first is not None:
                assert queries.shape == (4, 64)
                assert np.array(queries).tobytes() == np.array(first).tobytes()
