"""What stays of a prompt: by what scores, heads, tails, windows and the cache say. No model."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.engine.specprefill.selection import (
    CHUNK,
    LEAST_HEAD,
    LEAST_TAIL,
    Kept,
    middle,
    select,
    worthwhile,
)
from millrace.protocol.specprefill import SparsePrefill


@st.composite
def prompts(draw: Any) -> tuple[Any, SparsePrefill, int, int, int]:
    length = draw(st.integers(1, 3000))
    sparse = SparsePrefill(
        keep=draw(st.floats(1e-9, 1.0)),
        head=draw(st.integers(0, length)),
        tail=draw(st.none() | st.integers(0, length)),
    )
    scores = np.random.default_rng(draw(st.integers(0, 99))).random(length)
    known = draw(st.sampled_from([0, 0, 17, length // 2, length - 1]))
    return scores, sparse, length, known, draw(st.sampled_from([0, 0, 700]))


@given(prompts())
def test_head_tail_window_and_the_best_of_the_rest_stay(given: Any) -> None:
    scores, sparse, length, known, window = given
    kept = select(scores, sparse, length, known, window)
    stays = np.zeros(length, bool)
    for first, end in kept.ranges:
        stays[first:end] = True
    assert Kept.of(kept.ranges, length) == kept
    assert stays.sum() == kept.count == length - kept.dropped
    head, tail = middle(sparse, length, window)
    assert stays[: max(known, sparse.head, min(LEAST_HEAD, length))].all()
    assert stays[-max(LEAST_TAIL, window) :].all()
    if sparse.tail is not None:
        assert stays[max(sparse.tail, 0) :].all()
    assert stays[: kept.exact].all() and (kept.exact == length or not stays[kept.exact])
    chunks = [slice(at, min(at + CHUNK, tail)) for at in range(head, tail, CHUNK)]
    free = [c for c in chunks if c.start >= known]
    best = math.ceil(len(chunks) * sparse.keep)
    assert sum(stays[c].all() for c in chunks) >= best
    if not known:
        assert all(stays[c].all() or not stays[c].any() for c in chunks)
        assert sum(stays[c].all() for c in chunks) == best
    gone = [scores[c].mean() for c in free if not stays[c].any()]
    stay = [scores[c].mean() for c in free if stays[c].all()]
    assert not gone or not stay or min(stay) >= max(gone)


@given(prompts())
def test_what_is_cached_of_the_same_choice_changes_nothing(given: Any) -> None:
    scores, sparse, length, _, window = given
    kept = select(scores, sparse, length, 0, window)
    assert select(scores, sparse, length, kept.exact, window) == kept
    assert select(scores, sparse, length, kept.exact // 2, window) == kept


@given(prompts(), st.integers(0, 40))
def test_positions_are_those_that_tokens_had(given: Any, generated: int) -> None:
    scores, sparse, length, known, window = given
    kept = select(scores, sparse, length, known, window)
    tokens = list(range(length))
    left = [*kept.of_prompt(tokens), *range(length, length + generated)]
    assert kept.positions(0, len(left)) == left
    cut = len(left) // 3
    assert [*kept.positions(0, cut), *kept.positions(cut, len(left))] == left
    if generated:
        assert left[-1] == len(left) - 1 + kept.dropped


def test_a_share_of_one_keeps_all() -> None:
    kept = select(np.arange(2000.0), SparsePrefill(keep=1.0, head=10), 2000)
    assert kept.ranges == ((0, 2000),) and kept.dropped == 0 and kept.exact == 2000
    assert not worthwhile(SparsePrefill(keep=1.0), 20_000, 0)


def test_scores_that_are_no_numbers_choose_something() -> None:
    scores = np.full(5000, np.nan)
    kept = select(scores, SparsePrefill(keep=0.5), 5000)
    assert 2000 < kept.count < 3100


@pytest.mark.parametrize(
    ("sparse", "length", "known", "wanted"),
    [
        (SparsePrefill(0.3), 9000, 0, True),
        (SparsePrefill(0.3, least=8192), 8200, 0, False),  # the head is not counted
        (SparsePrefill(0.3, least=8192), 8224, 0, False),
        (SparsePrefill(0.3, least=8192), 8225, 0, True),
        (SparsePrefill(0.3, head=500, least=8192), 8692, 0, False),
        (SparsePrefill(0.3, head=500, least=8192), 8693, 0, True),
        (SparsePrefill(0.3, least=8192), 9192, 1000, False),
        (SparsePrefill(0.3, least=8192), 9193, 1000, True),
        (SparsePrefill(1e-9), 600, 0, True),
        (SparsePrefill(0.3, head=5000), 5010, 0, False),
        (SparsePrefill(0.3, least=8192), 9000, 1000, False),
        (SparsePrefill(0.3, head=4000, least=8192), 12_000, 0, False),
        (SparsePrefill(0.3, tail=3000, least=8192), 12_000, 0, False),  # nearly all must stay
        (SparsePrefill(0.3, tail=3000), 12_000, 0, True),
        (SparsePrefill(0.3), 540, 0, False),
        (SparsePrefill(0.3), 1000, 999, False),
        (SparsePrefill(0.99), 800, 0, False),
    ],
)
def test_a_draft_is_asked_where_that_is_worth_while(
    sparse: SparsePrefill, length: int, known: int, wanted: bool
) -> None:
    assert worthwhile(sparse, length, known) is wanted


@pytest.mark.parametrize("ranges", [[(0, 5), (4, 9)], [(0, 8)], [(3, 2), (5, 9)], [(0, 10)], []])
def test_ranges_that_cannot_be_are_refused(ranges: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match="kept of the prompt"):
        Kept.of(ranges, 9)
