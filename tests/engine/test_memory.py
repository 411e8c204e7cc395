"""Pre-emption: rows that give way come back and finish with the same tokens."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from engine.harness import Bench, cost, greedy_alone
from engine.preempted import Witness
from tiny import SHAPES, VOCAB, build

from millrace.config import EngineConfig
from millrace.engine.build import most_running
from millrace.engine.memory import Budget, StateCost
from millrace.protocol import Choice, Sampling, Submit

COUNT = 180
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
    return [(prompt, greedy_alone(model, prompt, COUNT)) for prompt in prompts]


def test_pre_empted_rows_without_a_cache_finish_as_if_undisturbed(
    model: Any, alone: list[tuple[list[int], list[int]]]
) -> None:
    """They run again. Those that find what they had are in the parity matrix."""
    prompts = [prompt for prompt, _ in alone]
    each = replace(cost(model), chunk=64)
    budget = Budget(each, max(2 * each.row(280), each.row(440)))
    bench = Witness(model, budget=budget, prefill_chunk=64)
    generated = bench.run(
        Submit(i, p, [Choice(0, i)], COUNT, Sampling(temperature=0.0), priority=i % 2)
        for i, p in enumerate(prompts)
    )
    for i, (_, undisturbed) in enumerate(alone):
        assert generated[i, 0] == undisturbed
    if not each.per_token:
        assert not bench.again, "state that does not grow needs no room"
        return
    assert bench.again, "nothing was pre-empted: the test is too easy"
    assert all(part.cached == 0 for part in bench.again.values())


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


@pytest.mark.parametrize(
    ("given", "memory", "on_cpu", "running"),
    [
        (None, 1 << 40, True, 32),
        (None, 1 << 40, False, 256),
        (None, 100 * 1024 * 1000, False, 100),
        (None, 1000, False, 32),
        (5, 1 << 40, False, 5),
        (300, 1 << 40, True, 300),
    ],
)
def test_how_many_sequences_run_follows_from_the_memory(
    given: int | None, memory: int, on_cpu: bool, running: int
) -> None:
    config = EngineConfig(model="a", name="a", max_running=given)
    budget = Budget(StateCost(per_token=1000), memory)
    assert most_running(config, budget, on_cpu) == running
