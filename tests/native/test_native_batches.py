"""Sequences as the engine runs them: of unequal length in one pass, coming and going, with draft tokens of
which some hold, with pieces of prompts beside rows, and prompts that go on from kept state. Each has the
bits that it has alone."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("llvmlite")

from native_models import Array, Kind, random_tokens, run

from millrace.cache.state import RestoredState
from millrace.engine.runner import Runner, SequenceRun
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
    """Sequences of tokens, and the logits that each has by itself."""

    def __init__(self, kind: Kind) -> None:
        self.model: NativeModel = kind.native()
        self.rows = [random_tokens(LENGTH, seed) for seed in range(6)]
        self.logits: list[Array] = [run(self.model, row) for row in self.rows]


@pytest.fixture(scope="module", params=KINDS)
def alone(request: pytest.FixtureRequest) -> Alone:
    return Alone(KINDS[request.param])


def launch(runner: Runner, runs: list[tuple[int, list[int]]]) -> list[Array]:
    """Run these tokens of each sequence in one pass: the logits of all of them."""
    tokens = [token for _, some in runs for token in some]
    parts = [SequenceRun(number, len(some)) for number, some in runs]
    logits = runner.run(mx.array(tokens, mx.int32), parts, range(len(tokens)))
    return np.split(np.array(logits), np.cumsum([part.count for part in parts])[:-1])


def prefill(runner: Runner, number: int, tokens: list[int], *borders: int) -> None:
    """Begin a sequence, with these tokens in pieces and no logits."""
    runner.begin(number)
    for a, b in zip([0, *borders], [*borders, len(tokens)], strict=True):
        if a < b:
            piece = mx.array(tokens[a:b], mx.int32)
            assert runner.run(piece, [SequenceRun(number, b - a)], []) is None


def step(runner: Runner, alone: Alone, numbers: list[int], counts: list[int]) -> None:
    """Run more tokens of sequences that go by their row's number, and compare."""
    runs = []
    for number, count in zip(numbers, counts, strict=True):
        at = runner.length(number)
        runs.append((number, alone.rows[number][at : at + count]))
    before = [runner.length(number) for number in numbers]
    for found, number, at, (_, some) in zip(
        launch(runner, runs), numbers, before, runs, strict=True
    ):
        assert found.tobytes() == alone.logits[number][at : at + len(some)].tobytes()


def keep(runner: Runner, number: int, length: int) -> Any:
    """The first tokens of a sequence as the prefix cache keeps them."""
    return runner.segments(pack=False).keep(runner.state_of(number), 0, length)


def held(runner: Runner, kept: Any) -> list[Any]:
    """What lies in kept pages."""
    return list(runner.segments(pack=False).payload(kept).arrays.values())


def restored(runner: Runner, number: int, length: int, kept: Any) -> None:
    """Begin a sequence with the first tokens of kept state."""
    caches = runner.make_caches()
    pages = runner.segments(pack=False).restore(caches, runner.layout, [kept], length)
    runner.begin(number)
    runner.adopt(number, RestoredState(caches, pages), length)


def test_sequences_of_unequal_length_have_the_bits_they_have_alone(alone: Alone) -> None:
    runner = Runner(alone.model)
    numbers: list[int] = []
    for number, length in enumerate((1, 150, 37, 16, 129, 64)):
        prefill(runner, number, alone.rows[number][:length], length // 3)
        numbers.append(number)
        for _ in range(2):
            step(runner, alone, numbers, [1] * len(numbers))
    for number in (0, 3, 4):
        runner.drop(number)
    for counts in ([1, 1, 1], [4, 1, 2], [2, 5, 3], [1, 1, 1]):
        step(runner, alone, [5, 1, 2], counts)


def test_prompts_beside_rows_have_the_bits_they_have_alone(alone: Alone) -> None:
    """Whatever shares a pass, in whatever order: one token of a row, and pieces of prompts."""
    runner = Runner(alone.model)
    for number in range(6):
        runner.begin(number)
    for order in ([0, 1], [1, 0, 2], [2, 3, 1, 0], [5, 4, 3, 2, 1, 0]):
        for counts in ([1] * 6, [1, 1, 17, 30, 1, 2], [25, 1, 3, 1, 40, 1], [13] * 6):
            left = [LENGTH - runner.length(number) for number in order]
            taken = [min(count, room) for count, room in zip(counts, left, strict=False)]
            some = [(n, count) for n, count in zip(order, taken, strict=True) if count]
            step(runner, alone, [n for n, _ in some], [count for _, count in some])


@settings(max_examples=12)
@given(
    st.lists(st.integers(1, 140), min_size=1, max_size=6),
    st.lists(st.tuples(st.integers(1, 6), st.integers(0, 2**30)), min_size=1, max_size=8),
)
def test_draft_tokens_that_hold_in_part_leave_every_sequence_its_bits(
    alone: Alone, lengths: list[int], steps: list[tuple[int, int]]
) -> None:
    """Sequences go on by the tokens that held, each by its own, with drafts of its own length."""
    runner = Runner(alone.model)
    for number, length in enumerate(lengths):
        prefill(runner, number, alone.rows[number][:length], length // 2)
    for most, seed in steps:
        runs, held = [], []
        for number in range(len(lengths)):
            at = runner.length(number)
            count = min(1 + (seed >> number) % most, LENGTH - at)
            if count < 1:
                continue
            right = 1 + (seed >> (4 * number)) % count
            wrong = random_tokens(count - right, seed)
            runs.append((number, alone.rows[number][at : at + right] + wrong))
            held.append((at, right))
        if not runs:
            break
        logits = launch(runner, runs)
        for (number, _), (at, right), found in zip(runs, held, logits, strict=True):
            assert found[:right].tobytes() == alone.logits[number][at : at + right].tobytes()
            runner.cut(number, at + right)


def test_pools_that_grow_keep_every_sequence(alone: Alone) -> None:
    runner = Runner(alone.model)
    prefill(runner, 0, alone.rows[0][:40])
    prefill(runner, 1, alone.rows[1][:140])
    sizes = {len(runner._pools[0])}
    for number in range(6, 200):
        prefill(runner, number, alone.rows[number % 6][:3])
        if len(runner._pools[0]) not in sizes:
            sizes.add(len(runner._pools[0]))
            step(runner, alone, [0, 1], [1, 1])
    assert len(sizes) > 3
    step(runner, alone, [1, 0], [2, 5])


def test_copies_of_a_sequence_go_their_own_ways(alone: Alone) -> None:
    runner = Runner(alone.model)
    shared = alone.rows[0][:50]
    prefill(runner, 0, shared)
    runner.fork(0, [1, 2, 3])
    tails = [random_tokens(5, seed) for seed in (20, 21, 22)]
    for at in range(5):
        found = launch(runner, [(n, [tail[at]]) for n, tail in enumerate(tails, start=1)])
    for tail, logits in zip(tails, found, strict=True):
        assert logits[0].tobytes() == run(alone.model, shared + tail)[-1].tobytes()


def test_kept_state_is_not_written_over_by_those_who_go_on_from_it(alone: Alone) -> None:
    runner = Runner(alone.model)
    prefill(runner, 0, alone.rows[0][:70])
    kept = keep(runner, 0, 70)
    before = None
    for _ in range(2):
        for number, tail in enumerate((alone.rows[0][70:90], random_tokens(20, 30)), start=1):
            restored(runner, number, 64, kept)
            launch(runner, [(number, alone.rows[0][64:70] + tail)])
        found = [np.array(array) for array in held(runner, kept)]
        assert before is None or all(map(np.array_equal, before, found))
        before = found
    (logits,) = launch(runner, [(1, alone.rows[0][90:91])])
    assert logits.tobytes() == alone.logits[0][90:91].tobytes()


def test_kept_state_outlives_the_sequence_whose_pages_others_take(alone: Alone) -> None:
    runner = Runner(alone.model)
    for number in range(2):
        prefill(runner, number, alone.rows[number][:30])
    step(runner, alone, [0, 1], [1, 1])
    kept = keep(runner, 1, 31)
    runner.drop(1)
    prefill(runner, 2, alone.rows[2][:40])
    step(runner, alone, [0, 2], [1, 1])
    restored(runner, 1, 31, kept)
    step(runner, alone, [1], [5])


def test_a_pass_that_raises_leaves_every_sequence_as_it_was(alone: Alone) -> None:
    runner = Runner(alone.model)
    for number, length in enumerate((20, 127)):
        prefill(runner, number, alone.rows[number][:length])
    used = runner.nbytes
    with pytest.raises(ValueError, match="Token ids"):
        launch(runner, [(0, [1, 2]), (1, [3, 10**6])])
    assert [runner.length(n) for n in range(2)] == [20, 127]
    assert runner.nbytes == used
    step(runner, alone, [0, 1], [2, 2])
