"""What is reported of a prompt that is run in parts or twice: once, and only what the request found."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from engine.harness import Bench, cost, greedy_alone
from tiny import VOCAB, build

from millrace.engine.memory import Budget
from millrace.engine.runner import Runner
from millrace.engine.turn import Begin, decoder
from millrace.protocol import Choice, FromEngine, Prefilled, PromptLogprobs, Sampling, Step, Submit

GREEDY = Sampling(temperature=0.0)
PROMPT = [(7 * n * n) % VOCAB for n in range(300)]


class Reader(Bench):
    """A bench that keeps every report, and not only the last."""

    def __init__(self, *args: Any, **more: Any) -> None:
        self.scores: list[PromptLogprobs] = []
        self.parts: list[Prefilled] = []
        super().__init__(*args, **more)

    def _deliver(self, message: FromEngine) -> None:
        if isinstance(message, Step):
            self.scores += message.prompt_logprobs
            self.parts += message.prefilled
        super()._deliver(message)

    def begun(self) -> list[Begin]:
        """Prompts as they began, those that began again included."""
        turns = [decoder.decode(turn) for _, turn in self.journal]
        return [o for turn in turns for o in turn.operations if isinstance(o, Begin)]


@pytest.fixture(scope="module")
def model() -> Any:
    return build("llama")


@pytest.mark.parametrize("cache", [1 << 28, None])
def test_rows_that_follow_later_score_and_report_the_prompt_no_second_time(
    model: Any, cache: int | None
) -> None:
    bench = Reader(model, cache=cache, max_running=2, prefill_chunk=64)
    choices = [Choice(k, k) for k in range(5)]
    bench.run([Submit(1, PROMPT, choices, 6, GREEDY, prompt_logprobs=2)])
    assert len(bench.begun()) == 3, "the request was not narrowed: the test is too easy"
    assert [b.scored for b in bench.begun()] == [True, False, False]
    assert [(s.id, len(s.items)) for s in bench.scores] == [(1, len(PROMPT) - 1)]
    assert [p.done for p in bench.parts] == sorted(p.done for p in bench.parts)
    assert {(p.cached, p.hit) for p in bench.parts} == {(0, "none")}
    alone = greedy_alone(model, PROMPT, 6)
    assert bench.generated == {(1, k): alone for k in range(5)}


def test_what_a_displaced_prompt_finds_of_itself_is_not_reported_as_found(model: Any) -> None:
    each = cost(model)
    bench = Reader(model, cache=1 << 28, prefill_chunk=32, budget=Budget(each, each.row(600)))
    ticks = itertools.count()
    bench.engine._clock = lambda: next(ticks) * 2.0
    bench.put(Submit(1, PROMPT, [Choice(0, 0)], 6, GREEDY), turns=3)
    other = [(5 * n + 3) % VOCAB for n in range(300)]
    bench.run([Submit(2, other, [Choice(0, 0)], 6, GREEDY, priority=1)])
    prefills = [b.prefill for b in bench.begun()]
    assert prefills == [prefills[0], prefills[1], prefills[0]], "the first was not displaced"
    mine = [p for p in bench.parts if p.id == 1]
    dones = [p.done for p in mine]
    assert dones == sorted(dones) and dones[1] > 0, "it found what it had"
    assert {(p.cached, p.hit) for p in mine} == {(0, "none")}
    assert bench.generated[1, 0] == greedy_alone(model, PROMPT, 6)
    assert bench.generated[2, 0] == greedy_alone(model, other, 6)


@pytest.mark.parametrize("pipelined", [False, True])
def test_tokens_and_the_end_are_sent_before_the_next_pass_is_run(
    model: Any, monkeypatch: pytest.MonkeyPatch, pipelined: bool
) -> None:
    happened: list[str] = []

    class Listener(Bench):
        def _deliver(self, message: FromEngine) -> None:
            if isinstance(message, Step) and message.rows:
                happened.append("end" if message.rows[0].finish else "token")
            super()._deliver(message)

    def noted(self: Runner, *args: Any, **more: Any) -> Any:
        happened.append("pass")
        return run(self, *args, **more)

    run = Runner.run
    monkeypatch.setattr(Runner, "run", noted)
    bench = Listener(model, pipelined=pipelined, prefill_chunk=8)
    bench.put(Submit(1, PROMPT[:5], [Choice(0, 0)], 12, GREEDY), turns=4)
    bench.put(Submit(2, PROMPT, [Choice(0, 0)], 2, GREEDY))
    turns: list[list[str]] = []
    while (1, 0) not in bench.finish:
        happened.clear()
        bench.turn()
        turns.append([*happened])
    assert len(turns) > 4 and bench.prefilled[2] > 20, "no prompt ran beside it: it is too easy"
    assert all(turn == ["pass", "token"] for turn in turns[:-1])
    # The end is read when the next pass has not been launched, or before that of the prompt alone.
    assert turns[-1] == (["end", "pass"] if pipelined else ["pass", "end"])
    bench.drain()
