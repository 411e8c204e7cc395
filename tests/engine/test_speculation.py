"""Draft tokens: pure parts by themselves, and the engine with it against the plain loop."""

from __future__ import annotations

import random
from typing import Any

import pytest
from harness import Bench, greedy_alone
from hypothesis import given
from hypothesis import strategies as st
from tiny import VOCAB, build

from millrace.engine.pacing import Pacing, decode_size
from millrace.engine.speculation import LONGEST, PRIOR, Draft, Drafter, Lookup, Speculation
from millrace.protocol import Abort, Choice, Sampling, Submit

AGAIN, GONE, OTHER, STOPS = range(100, 104)
"""Ids of requests."""

TEXT = st.lists(st.integers(0, 3), max_size=40)


@given(TEXT, TEXT, st.integers(1, 8))
def test_a_draft_is_what_followed_the_same_tokens_last(
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
    assert lookup.draft(count) == Draft(expected, run)


class _Row:
    """A row whose text repeats itself, and whose draft tokens held as often as said."""

    draftable, left = True, 100

    def __init__(self, share: float) -> None:
        self.drafter: Drafter | None = Drafter(dict.fromkeys(PRIOR, share))
        self._text = [1, 2, 3, 4, 5] * 4
        self.length = len(self._text)

    def context(self, start: int) -> list[int]:
        return self._text[start:]


def _pacing(max_stall: float = 10.0) -> Pacing:
    """A step takes a second, each token of it a tenth."""
    pacing = Pacing(max_stall, 512)
    for rows in range(1, 9):
        for more in (0, 7, 30):
            size = decode_size([0] * rows, more)
            pacing.cost.saw(size, 1.0 + 0.1 * size.tokens)
    return pacing


def _drafted(share: float, rows: int, pacing: Pacing, **more: bool) -> int:
    """Draft tokens of a step of such rows."""
    batch = [_Row(share) for _ in range(rows)]
    planned = decode_size([row.length for row in batch])
    return sum(map(len, Speculation(8, pacing).propose(batch, planned, **more)))


def test_draft_tokens_that_hold_are_worth_more_tokens() -> None:
    pacing = _pacing()
    assert _drafted(0.99, 1, pacing) > _drafted(0.6, 1, pacing) >= 1
    assert _drafted(0.02, 1, pacing) == 0
    assert Speculation(8, pacing).propose([], decode_size([])) == []
    # A token of one row makes the step longer for all: it must make more than others do in that time.
    assert _drafted(0.3, 16, pacing) == 0


def test_rows_get_draft_tokens_by_their_own_shares() -> None:
    batch = [_Row(0.99), _Row(0.02)]
    sure, unsure = Speculation(8, _pacing()).propose(batch, decode_size([20, 20]))
    assert len(sure) >= 4 and not unsure
    assert sure == ([1, 2, 3, 4, 5] * 2)[: len(sure)]


def test_nothing_is_drafted_before_a_step_was_measured() -> None:
    assert _drafted(0.99, 1, Pacing(10.0, 512)) == 0


def test_draft_tokens_keep_the_promise_and_leave_prompts_half_of_the_room() -> None:
    alone = _drafted(0.99, 4, _pacing(max_stall=2.6))
    assert 0 < alone <= 12
    beside = _drafted(0.99, 4, _pacing(max_stall=2.6), prompts=True)
    assert 0 < beside <= 6
    assert _drafted(0.99, 4, _pacing(max_stall=1.0)) == 0


def test_a_row_is_trusted_as_its_draft_tokens_hold() -> None:
    drafter = Drafter(PRIOR)
    drafter.draft = Draft([1, 2, 3, 4], 3)
    before = drafter.share
    drafter.confirmed(4, 4)
    assert drafter.share > before
    for _ in range(20):
        drafter.confirmed(4, 0)
    assert drafter.share < 0.05
    for _ in range(1000):
        drafter.untried()
    assert drafter.share > 0.5


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def model(request: pytest.FixtureRequest) -> Any:
    return build(request.param)


class _Eager(Speculation):
    """Tries whatever it can, right or wrong."""

    def _counts(self, rows: Any, drafters: Any, planned: Any, most: Any) -> list[int]:
        return [len(d.draft.tokens) if d is not None else 0 for d in drafters]


def _bench(model: Any, **more: Any) -> Bench:
    bench = Bench(model, speculate=4, **more)
    decider = bench.engine._decider
    decider._speculation = _Eager(4, decider._pacing)
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


def test_rows_that_cannot_draft_sit_beside_those_that_do(model: Any) -> None:
    plain, scored = Sampling(temperature=0.0), Sampling(temperature=0.0, repetition_penalty=1.2)
    submits = [
        Submit(i, p, [Choice(0, i)], 25, scored if i % 2 else plain, logprobs=i % 3 or None)
        for i, p in enumerate(_prompts(5))
    ]
    with_drafts, without = _bench(model), Bench(model)
    assert with_drafts.run(submits) == without.run(submits)
    for key, scores in without.logprobs.items():
        reported = [s.logprob for s in with_drafts.logprobs[key]]
        assert reported == pytest.approx([s.logprob for s in scores], abs=1e-4)


def test_stops_and_aborts_in_the_middle_of_drafts(model: Any) -> None:
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
