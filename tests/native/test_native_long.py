"""Long rows: many blocks of keys, windows across their borders, tables and caches that must grow."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

pytest.importorskip("llvmlite")

from native_models import Kind, in_pieces, logprobs, plain_cache, random_tokens, run

from millrace.engine.memory import Rectangle
from millrace.engine.runner import Runner

LONG = random_tokens(1500)


@pytest.mark.parametrize("window", [0, 1, 300])
def test_fifteen_hundred_keys_are_seen_as_the_window_says(window: int) -> None:
    more = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": window}
    kind = Kind(heads=(3, 1), more=more if window else {}, dtype=mx.float16)
    model = kind.native()
    own = run(model, LONG)
    # MLX turns heads by angles that are floats: at places like these they are off by 1e-4.
    theirs = logprobs(run(kind.in_float32(), LONG))
    np.testing.assert_allclose(logprobs(own), theirs, atol=2e-3, rtol=0)
    borders = [700, 701, 703, 1020, 1024, 1025, 1152, 1153, 1157, 1408, 1499]
    assert in_pieces(model, LONG, borders).tobytes() == own.tobytes()


def test_the_last_tokens_of_long_rows_one_by_one_on_any_threads() -> None:
    """Blocks of keys are spread over threads where there are few queries, and merged."""
    more = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 130}
    kind = Kind(heads=(4, 1), more=more)
    whole = run(kind.native(1), LONG)
    for threads in (1, 2, 3):
        borders = [1270, 1271, 1272, 1275, 1278, 1280, 1281, 1300]
        found = in_pieces(kind.native(threads), LONG[:1302], borders)
        assert found.tobytes() == whole[:1302].tobytes()


def test_one_long_row_and_short_ones_in_a_batch() -> None:
    model = Kind(heads=(2, 1)).native()
    runner = Runner(model)
    rows = [LONG, random_tokens(30, 1), random_tokens(300, 2)]
    runner.reserve(Rectangle(3, 1411))
    for number, length in enumerate((1407, 3, 255)):
        runner.begin(number, length)
        runner.chunk(number, rows[number][:length], length, beside=False, scored=False)
        runner.join(number, 1, length)
    for step in range(4):
        inputs = [row[at + step] for row, at in zip(rows, (1407, 3, 255), strict=True)]
        logits = np.array(runner.step(mx.array(inputs, mx.int32)[:, None]))
    for row, at, found in zip(rows, (1411, 7, 259), logits, strict=True):
        assert found[0].tobytes() == run(model, row[:at])[-1].tobytes()


def test_caches_and_tables_grow_while_rows_stay_what_they_are() -> None:
    """Passes of every size in turn: each makes other tables too small, and old programs stale."""
    model = Kind(bits=4).native()
    fresh = run(Kind(bits=4).native(), LONG[:1400])
    cache, at, found = plain_cache(model), 0, []
    for count in (1, 2, 1, 7, 40, 1, 97, 1, 200, 3, 1, 500, 1, 300, 1, 8, 236):
        found.append(run(model, LONG[at : at + count], cache))
        at += count
    assert at == 1400
    assert np.concatenate(found).tobytes() == fresh.tobytes()


def test_many_sizes_of_passes_are_forgotten_and_come_again() -> None:
    model = Kind(layers=1).native()
    first = run(model, LONG[:80])
    for count in range(1, 80):
        assert run(model, LONG[:count]).tobytes() == first[:count].tobytes()
    assert len(model._programs) <= 64
    assert run(model, LONG[:80]).tobytes() == first.tobytes()
