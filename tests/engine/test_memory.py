"""Pre-emption: rows that give way come back and finish with the same tokens."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from engine.harness import Bench, cost, greedy_alone
from engine.preempted import Witness
from tiny import SHAPES, VOCAB, build

from millrace.engine.memory import Budget
from millrace.protocol import Choice, Sampling, Submit

BIG, SMALL = range(100, 102)
"""Ids of requests."""


@pytest.fixture(scope="module", params=list(SHAPES))
def model(request: pytest.FixtureRequest) -> Any:
    return build(request.param)


@pytest.fixture(scope="module")
def alone(model: Any) -> list[tuple[list[int], list[int]]]:
    """Prompts, and what follows them where nobody disturbs."""
    dice = random.Random(5)
    prompts = [[dice.randrange(VOCAB) for _ in range(120 + 40 * i)] for i in range(3)]
    return [(prompt, greedy_alone(model, prompt, 340)) for prompt in prompts]


@pytest.mark.parametrize("kept", [True, False])
def test_pre_empted_rows_finish_as_if_undisturbed(
    model: Any, alone: list[tuple[list[int], list[int]]], kept: bool
) -> None:
    """With a cache they find what they had; without one they run it again."""
    prompts = [prompt for prompt, _ in alone]
    each = replace(cost(model), chunk=64)
    budget = Budget(each, max(Budget(each, 0).least([440, 440]), each.row(700)))
    bench = Witness(model, budget=budget, prefill_chunk=64, cache=1 << 28 if kept else None)
    generated = bench.run(
        Submit(i, p, [Choice(0, i)], 340, Sampling(temperature=0.0), priority=i % 2)
        for i, p in enumerate(prompts)
    )
    for i, (_, undisturbed) in enumerate(alone):
        assert generated[i, 0] == undisturbed
    if not each.per_token:
        assert not bench.again, "state that does not grow needs no room"
        return
    assert bench.again, "nothing was pre-empted: the test is too easy"
    for id, part in bench.again.items():
        assert part.cached >= len(prompts[id]) if kept else part.cached == 0


def test_a_prompt_that_can_never_fit_is_refused(model: Any) -> None:
    each = cost(model)
    if not each.per_token:
        pytest.skip("this shape's state does not grow")
    bench = Bench(model, budget=Budget(each, each.row(300)))
    bench.put(Submit(BIG, [1] * 2000, [Choice(0, 0)], 4))
    bench.put(Submit(SMALL, [1] * 20, [Choice(0, 0)], 4))
    bench.engine.turn()
    bench.drain()
    assert "--kv-memory" in bench.failed[BIG].message
    assert len(bench.generated[SMALL, 0]) == 4
