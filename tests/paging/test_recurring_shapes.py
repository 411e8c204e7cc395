"""Runs that are padded so that shapes recur: the same attention, with free pages full of NaN."""

from __future__ import annotations

import random

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.paging import plain
from millrace.paging.passes import Run, flat_pass, is_long
from millrace.paging.rule import AttentionRule

PAGE, HEADS, SHARED, SIZE = 32, 2, 2, 32


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 1500),
    st.integers(1, 700),
    st.sampled_from([None, 64, 900, 4000]),
    st.integers(0, 9),
)
def test_padding_changes_no_result(first: int, count: int, window: int | None, seed: int) -> None:
    numbers = np.random.default_rng(seed)
    pages = list(range(1, 90))
    random.Random(seed).shuffle(pages)
    end = first + count
    table = pages[: -(-end // PAGE)]
    at = flat_pass([Run(0, first, count)], [[table]], PAGE)
    pools = []
    for _ in range(2):
        pool = np.full((90 * PAGE, HEADS, SIZE), np.nan, np.float32)
        slots = [table[n // PAGE] * PAGE + n % PAGE for n in range(end)]
        pool[slots] = numbers.normal(size=(end, HEADS, SIZE))
        pools.append(mx.array(pool).reshape(-1, PAGE, HEADS, SIZE))
    queries = mx.array(numbers.normal(size=(count, HEADS * SHARED, SIZE)).astype(np.float32))
    rule = AttentionRule(SIZE**-0.5, window)
    want, found = (
        plain.attend_run(queries, *pools, at.groups[0], at.runs[0], rule, recurring=recurring)
        for recurring in (False, True)
    )
    assert found.shape == want.shape
    assert np.abs(np.array(found) - np.array(want)).max() < 1e-5


@pytest.mark.parametrize(
    ("first", "count", "long"),
    [(0, 255, False), (0, 256, True), (1000, 63, False), (1000, 64, True), (900, 64, False)],
)
def test_which_runs_are_gathered(first: int, count: int, long: bool) -> None:
    assert is_long(first, count) is long
