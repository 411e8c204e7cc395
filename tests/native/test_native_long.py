"""Long rows: many blocks of keys, windows across their borders, tables and caches that must grow."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

pytest.importorskip("llvmlite")

from native_models import Kind, in_pieces, logprobs, plain_cache, random_tokens, run
from native_pages import PagedSequences

from millrace.native import model as native_model

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


def test_one_long_sequence_and_short_ones_in_a_pass() -> None:
    model = Kind(heads=(2, 1)).native()
    sequences = PagedSequences(model)
    rows = [LONG, random_tokens(30, 1), random_tokens(300, 2)]
    for number, length in enumerate((1407, 3, 255)):
        sequences.prefill(number, rows[number][:length])
    for _ in range(4):
        found = sequences.run({n: [row[sequences.length(n)]] for n, row in enumerate(rows)})
    for number, row in enumerate(rows):
        whole = run(model, row[: sequences.length(number)])
        assert found[number][0].tobytes() == whole[-1].tobytes()


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


def test_passes_of_all_sizes_share_a_few_programs() -> None:
    model = Kind(layers=1).native()
    first = run(model, LONG[:100])
    for count in range(1, 100):
        assert run(model, LONG[:count]).tobytes() == first[:count].tobytes()
    assert len(model._programs) <= 10
    assert run(model, LONG[:100]).tobytes() == first.tobytes()


def test_programs_that_are_too_many_are_forgotten_and_come_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(native_model, "_MOST_PROGRAMS", 2)
    model = Kind(layers=1).native()
    first = run(model, LONG[:40])
    for count in (1, 2, 4, 8, 12, 1, 40):
        assert run(model, LONG[:count]).tobytes() == first[:count].tobytes()
        assert len(model._programs) <= 2
