"""Guessing ahead: pure parts by themselves, and the engine with it against the plain loop."""

from __future__ import annotations

import random
from typing import Any

import pytest
from harness import Bench, greedy_alone
from hypothesis import given
from hypothesis import strategies as st
from tiny import VOCAB, build

from millrace.engine.latency_model import LatencyModel
from millrace.engine.learning import Learning
from millrace.engine.speculation import HOPEFUL, LONGEST, Guess, Guesser, Lookup, Speculation
from millrace.engine.turn import Outcome, RowResult
from millrace.protocol import Abort, Choice, Sampling, Submit

AGAIN, GONE, OTHER, STOPS = range(100, 104)
"""Ids of requests."""

TEXT = st.lists(st.integers(0, 3), max_size=40)


@given(TEXT, TEXT, st.integers(1, 8))
def test_a_guess_is_what_followed_the_same_tokens_last(
    first: list[int], rest: list[int], count: int
) -> None:
    lookup = Lookup()
    lookup.extend(first)
    lookup.extend(rest)
    text = [*first, *rest]
    expected, run = [], 0
    for n in range(LONGEST, 0, -1):
        places = [e for e in range(n, len(text)) if text[e - n : e] == text[-n:]]
        if places and len(text) >= n:
            longer = list(text)
            for i in range(places[-1], places[-1] + count):
                longer.append(longer[i])
            expected, run = longer[len(text) :], n
            break
    assert lookup.guess(count) == Guess(expected, run)


class _Linear:
    promised = promised_step = float("inf")

    def step(self, rows: int) -> float:
        return 1.0 + 0.1 * rows

    def slowness(self, rows: int) -> float:
        return 1.0


def test_guesses_that_hold_are_worth_more_tokens() -> None:
    speculation = Speculation(8, _Linear())
    assert speculation.width([(0.99, 8)], 1) > speculation.width([(0.6, 8)], 1) >= 1
    assert speculation.width([(0.02, 8)], 1) == 0
    assert speculation.width([], 1) == 0
    # One row's guesses make the step longer for all.
    assert speculation.width([(0.5, 8)], 16) == 0


def _settled(
    width_seconds: dict[int, float], used_to: float = 0.0
) -> tuple[LatencyModel, Speculation]:
    """Four settled streams with steps of 50 ms, which guesses have made longer by what they are `used_to`,
    and steps with guesses that took so long."""
    latency = LatencyModel(512)
    speculation = Speculation(4, latency)
    for _ in range(100):
        latency.saw_step(4, 0.05)
        latency.saw_guesses(4, used_to)
        for width, seconds in width_seconds.items():
            speculation.saw_step(4 * (1 + width), seconds)
    latency.promise(4)
    return latency, speculation


SURE = [(0.99, 4)] * 4


def test_settled_streams_are_kept_from_guesses_that_are_felt() -> None:
    latency, speculation = _settled({})
    assert speculation.width(SURE, 4) == 1
    speculation.saw_step(8, 0.08)
    assert speculation.width(SURE, 4) == 1
    latency, speculation = _settled({1: 0.1})
    assert speculation.width(SURE, 4) == 0, "twice as long, and a bad moment makes it three times"
    latency, speculation = _settled({1: 0.08}, used_to=0.03)
    assert speculation.width(SURE, 4) == 2, "one more than has been seen"
    speculation.saw_step(12, 0.11)
    speculation.saw_step(16, 0.15)
    assert speculation.width(SURE, 4) == 2
    latency, speculation = _settled({1: 0.08})
    latency.promise(None)
    assert speculation.width(SURE, 4) == 4, "nobody minds"


def test_a_slow_moment_allows_no_longer_guesses() -> None:
    seconds = {1: 0.08, 2: 0.11, 3: 0.15, 4: 0.2}
    latency, speculation = _settled(seconds)
    assert speculation.width(SURE, 4) == 1
    latency, speculation = _settled(seconds, used_to=0.02)
    assert speculation.width(SURE, 4) == 2
    for _ in range(10):
        latency.saw_step(4, 0.09)  # another program has one of the cores
    latency.promise(4)
    assert latency.step(4) > 0.08
    assert speculation.width(SURE, 4) < 2, "they would take twice as long as well"
    for _ in range(100):
        latency.saw_step(4, 0.05)
    latency.promise(4)
    assert speculation.width(SURE, 4) == 2
    for _ in range(10):
        latency.saw_step(4, 0.09)
    for _ in range(100):
        latency.saw_guesses(4, 0.06)
    latency.promise(4)
    assert speculation.width(SURE, 4) < 2, "nobody gets used to them in a bad moment"
    for _ in range(100):
        latency.saw_step(4, 0.05)
        latency.saw_guesses(4, 0.06)
    for _ in range(10):
        latency.saw_step(4, 0.09)
    latency.promise(4)
    assert speculation.width(SURE, 4) == 2, "streams that are used to guesses keep them"


@pytest.mark.parametrize("seed", range(5))
def test_guesses_and_a_busy_machine_do_not_add_up(seed: int) -> None:
    """Streams that begin to repeat themselves while others need a core, for a quarter of a minute."""
    dice = random.Random(seed)
    latency = LatencyModel(512)
    speculation = Speculation(4, latency)
    learning = Learning(latency, speculation, pipelined=False)

    def gap(shares: list[tuple[float, int]], slower: float) -> tuple[int, float]:
        latency.promise(4)
        width = speculation.width(shares, 4)
        seconds = (0.026 + 0.01 * width) * slower * dice.choice([1.0, 1.05, 1.1])
        learning.step(4, width)
        learning.chunk(0, None)
        rows = [RowResult(n, [1]) for n in range(4)]
        learning.learn(Outcome(rows=rows, gap=seconds))
        return width, seconds

    alone = sorted(gap([], 1.0)[1] for _ in range(400))
    beside = [gap(SURE, dice.choice([1.3, 1.4, 1.5, 1.6])) for _ in range(500)]
    assert max(seconds for _, seconds in beside) < 2.5 * alone[-4]
    quiet = [gap(SURE, 1.0) for _ in range(1000)]
    assert sum(width for width, _ in quiet[500:]) > 500, "when all is quiet they guess again"


def test_a_step_says_once_how_late_it_was() -> None:
    told: list[float] = []

    class Told(LatencyModel):
        def saw_lateness(self, times: float) -> None:
            told.append(times)
            super().saw_lateness(times)

    latency = Told(512)
    learning = Learning(latency, Speculation(4, latency), pipelined=False)
    for width, seconds in ((0, 0.03), (2, 0.05), (2, 0.02)):  # the last is shorter than a plain one
        learning.step(4, width)
        learning.chunk(0, None)
        learning.learn(Outcome(rows=[RowResult(n, [1]) for n in range(4)], gap=seconds))
    assert len(told) == 3


def test_a_row_is_trusted_as_its_guesses_hold() -> None:
    guesser = Guesser(HOPEFUL)
    guesser.guess = Guess([1, 2, 3, 4], 3)
    before = guesser.share
    guesser.confirmed(4, 4)
    assert guesser.share > before
    for _ in range(20):
        guesser.confirmed(4, 0)
    assert guesser.share < 0.05
    for _ in range(1000):
        guesser.untried()
    assert guesser.share > 0.5


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def model(request: pytest.FixtureRequest) -> Any:
    return build(request.param)


class _Eager(Speculation):
    """Guesses whatever it can, right or wrong."""

    def width(self, shares: Any, rows: int) -> int:
        return max((n for _, n in shares), default=0)


def _bench(model: Any, **more: Any) -> Bench:
    bench = Bench(model, speculate=4, **more)
    decider = bench.engine._decider
    decider._speculation = decider._learning._speculation = _Eager(4, decider._latency)
    return bench


def _prompts(count: int) -> list[list[int]]:
    source = random.Random(3)
    phrase = [source.randrange(1, VOCAB) for _ in range(5)]
    return [
        [*phrase, *(source.randrange(1, VOCAB) for _ in range(i)), *phrase, *phrase[: 1 + i % 4]]
        for i in range(count)
    ]


def test_greedy_rows_equal_the_plain_loop(model: Any) -> None:
    bench = _bench(model)
    prompts = _prompts(6)
    for i, prompt in enumerate(prompts):
        bench.put(Submit(i, prompt, [Choice(0, i)], 40 - i, Sampling(temperature=0.0)), i % 3)
    bench.engine.turn()
    bench.drain()
    for i, prompt in enumerate(prompts):
        assert bench.generated[i, 0] == greedy_alone(model, prompt, 40 - i)
        assert bench.finish[i, 0] == "length"


def test_seeds_mean_the_same_with_and_without(model: Any) -> None:
    hot = Sampling(temperature=0.7, top_k=8)
    submits = [Submit(i, p, [Choice(0, i)], 30, hot) for i, p in enumerate(_prompts(4))]
    assert _bench(model).run(submits) == Bench(model).run(submits)


def test_rows_that_cannot_guess_sit_beside_those_that_do(model: Any) -> None:
    plain, scored = Sampling(temperature=0.0), Sampling(temperature=0.0, repetition_penalty=1.2)
    submits = [
        Submit(i, p, [Choice(0, i)], 25, scored if i % 2 else plain, logprobs=i % 3 or None)
        for i, p in enumerate(_prompts(5))
    ]
    with_guesses, without = _bench(model), Bench(model)
    assert with_guesses.run(submits) == without.run(submits)
    for key, scores in without.logprobs.items():
        reported = [s.logprob for s in with_guesses.logprobs[key]]
        assert reported == pytest.approx([s.logprob for s in scores], abs=1e-4)


def test_stops_and_aborts_in_the_middle_of_guesses(model: Any) -> None:
    prompt = _prompts(2)[1]
    whole = greedy_alone(model, prompt, 30)
    bench = _bench(model, cache=1 << 26)
    bench.put(Submit(OTHER, prompt, [Choice(0, 1)], 30, Sampling(temperature=0.0)), 3)
    bench.put(Submit(GONE, prompt, [Choice(0, 1)], 30, Sampling(temperature=0.0)), 3)
    bench.put(Abort(GONE))
    stop = whole[10]
    ends = Submit(STOPS, prompt, [Choice(0, 1)], 30, Sampling(temperature=0.0), stop_ids=[stop])
    bench.run([ends])
    assert bench.generated[OTHER, 0] == whole
    assert bench.generated[STOPS, 0] == whole[: whole.index(stop) + 1]
    assert bench.finish[STOPS, 0] == "stop"
    again = Submit(AGAIN, [*prompt, *whole], [Choice(0, 1)], 5, Sampling(temperature=0.0))
    bench.run([again])
    assert bench.generated[AGAIN, 0] == greedy_alone(model, [*prompt, *whole], 5)
    assert bench.found[AGAIN].cached >= len(prompt) + 28
