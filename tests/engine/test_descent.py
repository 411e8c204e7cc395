"""Draws down a tree: they follow the weights, both ways agree, and rounding hardly ever decides."""

from __future__ import annotations

from collections import Counter

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.engine.descent import FAN, depth, drawn, drawn_on_device, numbers

SHARES = st.floats(0, 1, exclude_max=True, width=32)


@pytest.mark.parametrize("width", [1, 2, 15, 16, 17, 255, 256, 257, 49152, 151936])
def test_the_tree_reaches_every_token(width: int) -> None:
    assert FAN ** depth(width) >= width
    only = np.zeros(width, np.float32)
    only[width - 1] = 0.5
    levels = numbers(1, 2, width)
    assert drawn(only, None, levels) == width - 1
    assert drawn_on_device(mx.array(only[None]), [levels]).tolist() == [width - 1]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=600), st.integers(0, 2**63), st.data())
def test_both_ways_find_the_same_token_and_one_that_has_weight(
    weights: list[int], seed: int, data: st.DataObject
) -> None:
    row = np.array(weights, np.float32)
    if not row.any():
        row[data.draw(st.integers(0, row.size - 1))] = 1
    levels = numbers(seed, 3, row.size)
    at = drawn(row, None, levels)
    assert row[at] > 0
    assert drawn_on_device(mx.array(row[None]), [levels]).tolist() == [at]
    ids = np.flatnonzero(row)
    assert ids[drawn(row[ids], ids, levels)] == at


@given(st.lists(SHARES, min_size=3, max_size=3))
def test_no_number_leads_past_the_end(levels: list[float]) -> None:
    row = np.ones(300, np.float32)
    assert 0 <= drawn(row, None, levels) < 300
    assert 0 <= drawn_on_device(mx.array(row[None]), [levels]).item() < 300


def test_rows_without_weight_get_the_first_token() -> None:
    assert drawn(np.zeros(40, np.float32), None, [0.9, 0.9]) == 0
    assert drawn_on_device(mx.zeros((1, 40)), [[0.9, 0.9]]).tolist() == [0]


def test_draws_follow_the_weights() -> None:
    row = np.zeros(700, np.float32)
    row[[3, 17, 250, 251, 699]] = [1, 2, 3, 4, 6]
    seen = Counter(drawn(row, None, numbers(7, i, row.size)) for i in range(8000))
    for token in (3, 17, 250, 251, 699):
        assert abs(seen[token] / 8000 - row[token] / 16) < 0.02
    assert sum(seen.values()) == 8000 and len(seen) == 5


def test_rounding_hardly_ever_decides() -> None:
    dice = np.random.default_rng(5)
    row = np.exp(dice.standard_normal(49152)).astype(np.float32)
    noisy = row * (1 + 2e-5 * dice.standard_normal(row.size)).astype(np.float32)
    levels = [numbers(11, i, row.size) for i in range(4000)]
    parted = sum(drawn(row, None, u) != drawn(noisy, None, u) for u in levels)
    assert parted <= 1
    # Against one sum over all of them it decides several times in as many draws.
    mass, other = (np.cumsum(w, dtype=np.float64) for w in (row, noisy))
    ones = np.array([u[0] + u[1] * 2**-24 for u in levels])
    found = [np.searchsorted(m, ones * m[-1], side="right") for m in (mass, other)]
    assert np.count_nonzero(found[0] != found[1]) > 2
