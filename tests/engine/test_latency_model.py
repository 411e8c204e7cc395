"""How long things take, as it is learnt, and the size of chunks that follows from it."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from millrace.engine.chunkcost import ChunkCost
from millrace.engine.latency_model import SMALLEST_CHUNK, LatencyModel
from millrace.engine.shapes import Shapes
from millrace.engine.smoothness import GAP_IN_STEPS, UNSEEN, longest_gap


def test_chunks_follow_the_step_to_come_and_the_wish() -> None:
    latency = LatencyModel(512)
    assert latency.chunk(2000, 0) == 500
    for _ in range(10):
        latency.saw_step(4, 0.04)
        latency.saw_step(8, 0.1)
    assert 7 <= latency.limit(4) == latency.limit(4, coming=1) <= 8, (
        "a chunk may cost a step beside its tokens, and a token a part of one"
    )
    for tokens in (50, 100) * 15:
        latency.saw_gap(4, tokens, 0.04 + tokens / 2500)
    assert 149 <= latency.limit(4) <= 150
    assert latency.limit(4, coming=5) == 200, "what so large a chunk takes has not been seen"
    latency.saw_chunk(250, 0.1)
    assert 274 <= latency.limit(4, coming=5) <= 275
    assert latency.chunk(2000, 4, coming=5) == 250
    assert latency.chunk(7, 4) == 7
    wish = LatencyModel(512, max_stall=0.3)
    wish.saw_step(4, 0.1)
    for tokens in (50, 100):
        wish.saw_gap(4, tokens, 0.1 + tokens / 1000)
    assert 199 <= wish.limit(4, coming=4) <= 200


@given(short=st.floats(1e-3, 2), longer=st.floats(0, 2))
def test_others_get_a_share_that_shrinks_as_steps_become_long(short: float, longer: float) -> None:
    long = short + longer
    assert longest_gap(short) <= longest_gap(long), "a longer step never means a shorter gap"
    assert longest_gap(long) / long <= longest_gap(short) / short * (1 + 1e-9)
    assert 1.5 * short <= longest_gap(short) * (1 + 1e-9)
    assert longest_gap(short) <= max(UNSEEN, 1.5 * short) * (1 + 1e-9)
    assert longest_gap(0.02) == GAP_IN_STEPS * 0.02


@given(
    base=st.floats(0, 3), token=st.floats(1 / 300, 1 / 4), step=st.floats(0.005, 0.3),
    drift=st.floats(0.998, 1.002),
)  # fmt: skip
@example(base=0.1640625, token=0.005, step=0.0625, drift=1.001953125)  # 255 and 256 tokens by turns
@settings(max_examples=300)
def test_chunks_find_their_size_whatever_they_take(
    base: float, token: float, step: float, drift: float
) -> None:
    latency = LatencyModel(512)
    for _ in range(10):
        latency.saw_step(4, step)
    base, token, spare = base * step, token * step, longest_gap(step) - step
    gaps, sizes, fitting, dear = [], [], [], []
    for _ in range(200):
        sizes.append(latency.limit(4))
        gaps.append(step + base + sizes[-1] * token)
        latency.saw_gap(4, sizes[-1], gaps[-1])
        fitting.append((spare - base) / token)
        dear.append(base + 32 * token > 0.8 * spare)
        base *= drift
    for gap, size, no_way in zip(gaps[150:], sizes[150:], dear[80:130], strict=True):
        # Where a chunk of any size takes too long, one must be worth it.
        assert size == SMALLEST_CHUNK or gap <= 1.2 * longest_gap(step) or no_way
    assert sizes[-1] >= min(512, 0.5 * min(fitting[150:])) - 2, (sizes[-1], fitting[-1])


@pytest.mark.parametrize("first", [[], [24], [30], [8], [24, 400], [512]])
def test_chunks_of_a_model_whose_tokens_are_dear_are_small_whatever_was_seen_first(
    first: list[int],
) -> None:
    """A chunk of few tokens that takes long need not take long for being a chunk."""
    latency = LatencyModel(512)
    for tokens in first:
        latency.saw_chunk(tokens, 0.05 + 0.0185 * tokens)
    for _ in range(10):
        latency.saw_step(2, 0.1)
    sizes = []
    for _ in range(50):
        sizes.append(latency.limit(2))
        latency.saw_gap(2, sizes[-1], 0.15 + 0.0185 * sizes[-1])
    assert max(sizes) <= 24 and sizes[20:] == [SMALLEST_CHUNK] * 30


def test_steps_that_were_not_measured_are_judged_from_those_that_were() -> None:
    latency = LatencyModel(512)
    assert latency.step(3) == 0.0
    latency.saw_step(1, 0.1)
    assert latency.step(1) < latency.step(6) == 0.2
    latency.saw_step(5, 0.3)
    assert abs(latency.step(3) - 0.2) < 1e-9


def test_a_gap_may_be_longer_while_many_wait() -> None:
    latency = LatencyModel(512)
    for rows in (2, 3, 4, 8):
        latency.saw_step(rows, 0.008 + 0.001 * rows)
    for tokens in (12, 24, 48, 96):
        latency.saw_chunk(tokens, 0.02 + tokens / 1000)
    assert latency.limit(2, coming=2) < 40
    assert 85 <= latency.limit(2, coming=3) <= 90, "what few would mind, less a step"
    assert latency.limit(8, coming=3) < 40
    slow = LatencyModel(512)
    for rows in (2, 3):
        slow.saw_step(rows, 0.2)
    for tokens in (12, 48):
        slow.saw_chunk(tokens, 0.02 + tokens / 1000)
    assert slow.limit(2, coming=2) == slow.limit(2, coming=1), "their steps are longer than that"


@given(st.integers(1, 3000), st.sampled_from([1, 6, 12]), st.integers(16, 512))
def test_a_prompt_in_chunks_leaves_no_crumb(left: int, grain: int, most: int) -> None:
    latency = LatencyModel(most, grain=grain)
    shapes = Shapes(grain=grain)
    chunks = []
    while left:
        chunk = latency.chunk(left, 0)
        chunks.append(shapes.whole(chunk) if chunk < left else chunk)
        left -= chunks[-1]
    assert all(0 < c <= most + grain // 2 for c in chunks)
    assert all(c % grain == 0 for c in chunks[:-1] if c > grain)
    assert len(chunks) == 1 or chunks[-1] >= grain // 2


@given(
    st.lists(st.tuples(st.integers(1, 512), st.floats(1e-4, 10)), min_size=1, max_size=200),
    st.integers(1, 512), st.floats(0, 20),
)  # fmt: skip
@example([(1, 0.75), (10, 1.0), (2, 4.125), (2, 1.0)], 2, 0.0)
def test_larger_chunks_never_seem_to_take_less(
    seen: list[tuple[int, float]], tokens: int, seconds: float
) -> None:
    cost = ChunkCost()
    for size, took in seen:
        cost.saw(size, took)
    assert 0 <= cost.of(tokens) <= cost.of(tokens + 1) < float("inf")
    most = cost.within(seconds, 512)
    assert not most or cost.of(most) <= seconds
    assert most == 512 or cost.of(most + 1) > seconds
    assert cost.token > 0 and cost.base >= 0 and cost.worth >= 0


def test_what_streams_are_used_to_is_not_what_a_bad_second_brings() -> None:
    latency = LatencyModel(512)
    for _ in range(200):
        latency.saw_step(4, 0.013)
    assert latency.smooth(4) == pytest.approx(GAP_IN_STEPS * 0.013)
    for _ in range(10):
        latency.saw_step(4, 0.09)
    assert latency.step(4) > 0.07
    assert latency.smooth(4) < 1.15 * GAP_IN_STEPS * 0.013
    for _ in range(2000):
        latency.saw_step(4, 0.09)
    assert latency.smooth(4) > 0.9 * GAP_IN_STEPS * 0.09, "it gets used to what lasts"
    for _ in range(50):
        latency.saw_step(4, 0.013)
    assert latency.smooth(4) < 1.4 * GAP_IN_STEPS * 0.013
    for _ in range(1000):
        latency.saw_step(4, 0.013)
    assert latency.smooth(4) < 1.1 * GAP_IN_STEPS * 0.013


def test_a_fast_moment_is_not_trusted() -> None:
    model = LatencyModel(512)
    for _ in range(50):
        model.saw_step(4, 0.02)
    assert model.slow_step(4) == pytest.approx(0.02, rel=0.05)
    model.saw_step(8, 0.03)
    assert model.slow_step(8) > 0.04, "one step says little"
    for _ in range(60):
        model.saw_step(8, 0.03)
    assert model.slow_step(8) == pytest.approx(0.03, rel=0.05)
    for _ in range(10):
        model.saw_step(8, 0.06)
    for _ in range(5):
        model.saw_step(8, 0.03)
    assert model.slow_step(8) > 0.05 > model.step(8), "a slow moment is remembered for a while"
    assert model.slow_step(12) > model.slow_step(8)


def test_a_slow_first_chunk_beside_rows_makes_the_next_no_giant() -> None:
    """Chunks that nobody waited beside took less: a line through both says that tokens cost nothing."""
    model = LatencyModel(512)
    for _ in range(4):
        model.saw_chunk(56, 0.15)
    for _ in range(20):
        model.saw_step(4, 0.05)
    model.saw_gap(4, 24, 0.27)
    assert model.limit(4, 1) <= 2 * 56


def test_chunks_of_new_streams_are_a_good_deal_on_a_slow_processor() -> None:
    """A chunk reads all the weights: where nobody has settled, more of them share that."""
    model = LatencyModel(512, grain=6)
    for _ in range(3):
        model.saw_chunk(229, 1.2)
    for _ in range(20):
        model.saw_step(2, 0.028)
    for _ in range(20):
        tokens = model.chunk(200, 2, 1)
        model.saw_chunk(tokens, 0.043 + 0.00525 * tokens)
    assert 24 <= model.limit(2, 1) <= 45, "up to a gap that few notice"
    assert 0.9 * 39 <= model.limit(2, 8) <= 1.1 * 39, "all of such a gap, where many wait"
    model.promise(4)
    assert model.limit(2, 1) < 24


def test_one_small_chunk_in_a_bad_moment_is_no_reason_for_large_ones() -> None:
    """Small chunks that seem dear would not be tried again, and all others felt by settled streams."""
    model = LatencyModel(512, grain=12)

    def seconds(tokens: int) -> float:
        return 0.03 + 0.0015 * tokens

    model.saw_chunk(56, seconds(56))
    for _ in range(100):
        model.saw_step(4, 0.03)
    model.promise(4)
    model.saw_chunk(19, 0.6)
    gaps = []
    for _ in range(40):
        tokens = model.chunk(4000, 4, 1)
        model.saw_chunk(tokens, seconds(tokens))
        gaps.append(seconds(tokens))
    assert max(gaps) < 0.15
