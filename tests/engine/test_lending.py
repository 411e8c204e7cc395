"""The prefix cache has what running sequences leave of the memory, and gives it back as they grow."""

from __future__ import annotations

import random
from typing import Any

import pytest
from engine.harness import Bench, cost, greedy_alone
from tiny import VOCAB, build

from millrace.engine.memory import Budget
from millrace.protocol import Choice, Sampling, Submit

FLOOR = 1 << 16


@pytest.fixture(scope="module")
def model() -> Any:
    return build("llama")


class _Counting(Bench):
    """Checks after every turn that both together have no more than there is."""

    most = 0

    def turn(self) -> None:
        super().turn()
        assert self.cache is not None
        held = self.engine._decider.held
        # What a row left behind is counted once, when the next pass is planned.
        if not self.idle:
            assert self.cache.nbytes + held <= self.budget.limit + FLOOR
        self.most = max(self.most, self.cache.nbytes)


def _prompt(seed: int, length: int) -> list[int]:
    dice = random.Random(seed)
    return [dice.randrange(VOCAB) for _ in range(length)]


def _submit(id: int, prompt: list[int], count: int = 4) -> Submit:
    return Submit(id, prompt, [Choice(0, 0)], count, Sampling(temperature=0.0))


@pytest.mark.parametrize("pipelined", [False, True])
def test_prefixes_use_memory_that_nothing_runs_in(model: Any, pipelined: bool) -> None:
    each = cost(model)
    budget = Budget(each, 8 * each.row(400))
    bench = _Counting(model, budget=budget, cache=FLOOR, pipelined=pipelined)
    prompts = [_prompt(n, 300) for n in range(6)]
    for id, prompt in enumerate(prompts):
        bench.run([_submit(id, prompt)])
    assert bench.cache is not None and bench.cache.nbytes > 4 * FLOOR
    for id, prompt in enumerate(prompts):
        bench.run([_submit(100 + id, prompt)])
        assert bench.found[100 + id].cached == 299
        assert bench.generated[100 + id, 0] == bench.generated[id, 0]

    # Eight sequences need all of it: none waits, and prefixes are down to what they have in any case.
    others = [_prompt(50 + n, 340) for n in range(8)]
    bench.run([_submit(200 + n, prompt, 40) for n, prompt in enumerate(others)])
    assert not bench.failed
    for n, prompt in enumerate(others):
        assert bench.generated[200 + n, 0] == greedy_alone(model, prompt, 40)


def test_answers_are_right_while_prefixes_come_and_go(model: Any) -> None:
    each, dice = cost(model), random.Random(3)
    budget = Budget(each, 4 * each.row(300))
    bench = _Counting(model, budget=budget, cache=FLOOR, max_running=8)
    bases = [_prompt(n, 200) for n in range(6)]
    prompts = {}
    for id in range(60):
        base = bases[dice.randrange(6)][: dice.randrange(20, 200)]
        prompts[id] = [*base, *_prompt(1000 + id, dice.randrange(1, 80))]
        bench.put(_submit(id, prompts[id], 6), dice.randrange(4))
    bench.drain()
    assert not bench.failed
    assert bench.most > 2 * FLOOR
    for id, prompt in prompts.items():
        assert bench.generated[id, 0] == greedy_alone(model, prompt, 6)
