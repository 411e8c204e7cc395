"""Many pipelined steps in little memory: pages are freed and taken again, and no token is wrong.

A short run by default; MILLRACE_HEAVY makes 100,000 steps of each shape.
"""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
from engine.harness import Bench, greedy_alone
from tiny import VOCAB, build

from millrace.engine.memory import Budget
from millrace.engine.sampling import DeviceSampling
from millrace.protocol import Abort, AbortChoice, Choice, Sampling, Submit

STEPS = 100_000 if os.environ.get("MILLRACE_HEAVY") else 300
LONGEST = 40
ROOM = 3
"""Sequences of the longest prompt that there is memory for."""
GREEDY = Sampling(temperature=0.0)


class _Crowd:
    """Random requests for prompts whose answers are known."""

    def __init__(self, model: Any, seed: int) -> None:
        self._dice = dice = random.Random(seed)
        heads = [[dice.randrange(VOCAB) for _ in range(n)] for n in (31, 32, 33, 96)]
        self.prompts = [
            [*dice.choice(heads), *(dice.randrange(VOCAB) for _ in range(dice.randrange(1, 40)))]
            for _ in range(24)
        ]
        self.expected = [greedy_alone(model, prompt, LONGEST) for prompt in self.prompts]
        longest = max(map(len, self.prompts)) + LONGEST
        cost = Bench(model, prefill_chunk=48).budget.cost
        self.bench = Bench(
            model,
            DeviceSampling(),
            Budget(cost, ROOM * cost.row(longest)),
            cache=cost.row(longest),
            pipelined=True,
            recurring=True,
            prefill_chunk=48,
            max_running=6,
        )
        self._asked: dict[int, tuple[int, int]] = {}
        """By request, its prompt and its number of tokens."""
        self.answered = 0

    def step(self, number: int) -> None:
        dice, sent = self._dice, False
        if len(self._asked) < 8 and dice.random() < 0.3:
            which, count = dice.randrange(len(self.prompts)), dice.randrange(1, LONGEST + 1)
            choices = [Choice(k, k) for k in range(dice.choice((1, 1, 1, 3)))]
            self._asked[number] = which, count
            submit = Submit(number, self.prompts[which], choices, count, GREEDY)
            submit.priority = dice.randrange(2)
            self.bench.put(submit)
            sent = True
        if self._asked and dice.random() < 0.03:
            gone = dice.choice(list(self._asked))
            # Its tokens until then are looked at as well.
            self._check(gone, whole=False)
            self.bench.put(dice.choice((Abort(gone), AbortChoice(gone, 0))))
            del self._asked[gone]
            sent = True
        if sent or not self.bench.idle:  # an idle engine blocks until a message arrives
            self.bench.turn()
        if number % 1000 == 0:
            self._tidy(number - 1000)
        for id in [id for id, _ in self.bench.finish if id in self._asked]:
            if id in self._asked and self._is_done(id):
                self._check(id, whole=True)
                self.answered += 1
                del self._asked[id]
                self._forget(id)

    def _is_done(self, id: int) -> bool:
        given = [key for key in self.bench.generated if key[0] == id]
        return all(key in self.bench.finish for key in given)

    def _check(self, id: int, *, whole: bool) -> None:
        which, count = self._asked[id]
        for key, tokens in self.bench.generated.items():
            if key[0] == id:
                assert tokens == self.expected[which][: len(tokens)], (id, which, len(tokens))
                assert len(tokens) == count or not whole

    def _forget(self, *gone: int) -> None:
        for record in (self.bench.generated, self.bench.finish, self.bench.logprobs):
            for key in [key for key in record if key[0] in gone]:
                del record[key]

    def _tidy(self, before: int) -> None:
        """Forget those that were aborted long ago, and what was written down for a replay."""
        self._forget(*{id for id, _ in self.bench.generated if id < before} - set(self._asked))
        self.bench.journal.clear()
        self.bench.pixels.clear()


@pytest.mark.parametrize("shape", ["llama", "gemma3_text", "qwen3_next"])
def test_pages_that_are_freed_and_taken_again_give_no_wrong_token(shape: str) -> None:
    crowd = _Crowd(build(shape), seed=STEPS)
    for number in range(STEPS):
        crowd.step(number)
    crowd.bench.drain()
    assert not crowd.bench.failed
    assert crowd.answered > STEPS // 40
