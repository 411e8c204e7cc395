from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from millrace.engine.rng import derive, uniform

seeds = st.integers(0, 2**63 - 1)


@given(seeds, st.integers(0, 10**6))
def test_a_draw_is_a_number_below_one_and_repeats(seed: int, index: int) -> None:
    assert 0.0 <= uniform(seed, index) < 1.0
    assert uniform(seed, index) == uniform(seed, index)


def test_draws_are_even_and_streams_differ() -> None:
    for seed in (0, 1, 2**62, derive(7, 3)):
        numbers = [uniform(seed, i) for i in range(4000)]
        assert abs(sum(numbers) / 4000 - 0.5) < 0.03
        tenths = [0] * 10
        for number in numbers:
            tenths[int(number * 10)] += 1
        assert max(tenths) < 500 and min(tenths) > 300
    assert len({derive(1, k) for k in range(1000)} | {1}) == 1001
