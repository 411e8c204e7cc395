"""A batch as the engine runs it: rows of unequal length in slots, rows that come and go, guesses of several
tokens, prompts in chunks and prompts that go on from kept state. Each row has the bits it has alone."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("llvmlite")

from native_models import Array, Kind, random_tokens, run

from millrace.cache.state import restore
from millrace.engine.memory import Rectangle
from millrace.engine.runner import Runner
from millrace.native.model import NativeModel

LENGTH = 180
KINDS = {
    "quantised": Kind(bits=4, dtype=mx.float16),
    "with windows": Kind(
        heads=(7, 1),
        more={
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 40,
        },
    ),
}


class Alone:
    """Rows of tokens, and the logits that each has by itself."""

    def __init__(self, kind: Kind) -> None:
        self.model: NativeModel = kind.native()
        self.rows = [random_tokens(LENGTH, seed) for seed in range(6)]
        self.logits: list[Array] = [run(self.model, row) for row in self.rows]


@pytest.fixture(scope="module", params=KINDS)
def alone(request: pytest.FixtureRequest) -> Alone:
    return Alone(KINDS[request.param])


def prefill(runner: Runner, job: int, tokens: list[int], width: int, *borders: int) -> None:
    runner.begin(job, width)
    for a, b in zip([0, *borders], [*borders, len(tokens)], strict=True):
        if a < b:
            runner.chunk(job, tokens[a:b], b - a, beside=False, scored=False)


def step(runner: Runner, alone: Alone, batch: list[list[int]], count: int) -> None:
    """Run so many more tokens of each row of a batch, and compare; rows are [number, place]."""
    inputs = [alone.rows[n][at : at + count] for n, at in batch]
    logits = np.array(runner.step(mx.array(inputs, mx.int32)))
    for found, (n, at) in zip(logits, batch, strict=True):
        assert found.tobytes() == alone.logits[n][at : at + count].tobytes()


def test_rows_of_unequal_length_have_the_bits_they_have_alone(alone: Alone) -> None:
    runner = Runner(alone.model)
    batch: list[list[int]] = []
    for number, length in enumerate((1, 150, 37, 16, 129, 64)):
        prefill(runner, number, alone.rows[number][:length], length + 1, length // 3)
        runner.reserve(Rectangle(number + 1, 176))
        runner.join(number, 1, length)
        batch.append([number, length])
        for _ in range(2):
            step(runner, alone, batch, 1)
            batch = [[n, at + 1] for n, at in batch]
    # Rows leave, and the last ones take their places.
    runner.keep_rows([5, 1, 2])
    batch = [batch[5], batch[1], batch[2]]
    for count in (1, 4, 2, 1):
        step(runner, alone, batch, count)
        if count > 1:
            runner.advance([count] * 3)
        batch = [[n, at + count] for n, at in batch]


@settings(max_examples=12)
@given(
    st.lists(st.integers(1, 140), min_size=1, max_size=6),
    st.lists(st.tuples(st.integers(1, 6), st.integers(0, 2**30)), min_size=1, max_size=8),
    st.integers(0, 63),
)
def test_guesses_that_hold_in_part_leave_every_row_its_bits(
    alone: Alone, lengths: list[int], steps: list[tuple[int, int]], more: int
) -> None:
    """Rows go on by as many tokens as held, each by its own; widths are whatever they are."""
    runner = Runner(alone.model)
    width = max(lengths) + sum(count for count, _ in steps) + more
    runner.reserve(Rectangle(len(lengths), width))
    batch = []
    for number, length in enumerate(lengths):
        prefill(runner, number, alone.rows[number][:length], length, length // 2)
        runner.join(number, 1, length)
        batch.append([number, length])
    for count, seed in steps:
        count = min(count, LENGTH - max(at for _, at in batch))
        if count < 1:
            break
        inputs, held = [], []
        for row, (n, at) in enumerate(batch):
            right = 1 + (seed >> (4 * row)) % count
            wrong = random_tokens(count - right, seed)
            inputs.append(alone.rows[n][at : at + right] + wrong)
            held.append(right)
        logits = np.array(runner.step(mx.array(inputs, mx.int32)))
        for found, right, (n, at) in zip(logits, held, batch, strict=True):
            assert found[:right].tobytes() == alone.logits[n][at : at + right].tobytes()
        if count > 1:
            runner.advance(held)
        batch = [[n, at + right] for (n, at), right in zip(batch, held, strict=True)]


def test_memory_that_changes_its_size_keeps_every_row(alone: Alone) -> None:
    runner = Runner(alone.model)
    for number in range(3):
        prefill(runner, number, alone.rows[number][: 40 + number], 41 + number)
        runner.reserve(Rectangle(number + 1, 43))
        runner.join(number, 1, 40 + number)
    batch = [[n, 40 + n] for n in range(3)]
    for slots, width in ((3, 43), (5, 101), (3, 45), (3, 179)):
        runner.reserve(Rectangle(slots, width))
        step(runner, alone, batch, 1)
        batch = [[n, at + 1] for n, at in batch]


def test_copies_of_a_row_go_their_own_ways(alone: Alone) -> None:
    runner = Runner(alone.model)
    shared = alone.rows[0][:50]
    prefill(runner, 0, shared, 51)
    runner.reserve(Rectangle(3, 80))
    runner.join(0, 3, 50)
    tails = [random_tokens(5, seed) for seed in (20, 21, 22)]
    for at in range(5):
        logits = np.array(runner.step(mx.array([[tail[at]] for tail in tails], mx.int32)))
    for tail, found in zip(tails, logits, strict=True):
        assert found[0].tobytes() == run(alone.model, shared + tail)[-1].tobytes()


def test_kept_state_is_not_written_over_by_those_who_go_on_from_it(alone: Alone) -> None:
    runner = Runner(alone.model)
    prefill(runner, 0, alone.rows[0][:70], 71)
    kept = runner.prompt_state(0).segment(0, 70, False)
    before = None
    for _ in range(2):
        for job, tail in enumerate((alone.rows[0][70:90], random_tokens(20, 30)), start=1):
            caches = restore(runner.make_caches(), runner.layout, 64, [kept], None, None)
            runner.adopt(job, caches, 100)
            runner.chunk(job, alone.rows[0][64:70] + tail, 26, beside=False, scored=False)
        found = [np.array(array) for array in kept.arrays]
        assert before is None or all(map(np.array_equal, before, found))
        before = found
    runner.reserve(Rectangle(1, 100))
    runner.join(1, 1, 90)
    step(runner, alone, [[0, 90]], 1)


def test_a_row_s_kept_state_outlives_the_row_in_its_slot(alone: Alone) -> None:
    """Kept lazily, and the slot is taken by a row that has nothing to copy into it."""
    runner = Runner(alone.model)
    runner.reserve(Rectangle(2, 64))
    for number in range(2):
        prefill(runner, number, alone.rows[number][:30], 31)
        runner.join(number, 1, 30)
    step(runner, alone, [[0, 30], [1, 30]], 1)
    kept = runner.row_state(1).segment(0, 31, False)
    runner.keep_rows([0])
    runner.join(7, 1, 0)
    step(runner, alone, [[0, 31], [2, 0]], 1)
    mx.eval(kept.arrays)
    caches = restore(runner.make_caches(), runner.layout, 31, [kept], None, None)
    runner.adopt(3, caches, 40)
    found = runner.chunk(3, alone.rows[1][31:36], 5, beside=False, scored=True)
    assert np.array(found)[0].tobytes() == alone.logits[1][31:36].tobytes()
