"""What the key-value budget counts is what is allocated, after every single operation."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import pytest
from engine.harness import Bench, cost
from tiny import VOCAB, build

from millrace.engine.memory import Budget
from millrace.protocol import Abort, Choice, Sampling, Submit


@pytest.fixture(scope="module")
def model() -> Any:
    return build("llama")


@pytest.fixture(autouse=True)
def exact() -> Iterator[None]:
    """MLX keeps no freed buffers, in which it would leave arrays that are smaller than they."""
    limit = mx.set_cache_limit(0)
    yield
    mx.set_cache_limit(limit)


class _Watched(Bench):
    """Looks at the memory that is held after every operation."""

    def __init__(self, model: Any, budget: Budget, **more: Any) -> None:
        super().__init__(model, budget=budget, **more)
        executor = self.engine._executor
        carry_out = executor._carry_out
        self.most = 0
        self.over: list[str] = []
        self.hidden = 0
        """Bytes at most that MLX held beyond pools (the prefix cache's too) and sequences' other state."""
        self.pools = 0
        """Bytes of all pools at most, free pages among them."""
        mx.synchronize()
        before = mx.get_active_memory()

        def watched(operation: Any) -> None:
            carry_out(operation)
            held = executor.nbytes
            executor._runner.wait()
            mx.synchronize()
            pools = executor._runner._allocated
            self.pools = max(self.pools, pools)
            beyond = mx.get_active_memory() - before - max(held, pools)
            self.hidden = max(self.hidden, beyond)
            self.most = max(self.most, held)
            if held > budget.limit:
                self.over.append(f"{held} of {budget.limit} after {operation}")

        executor._carry_out = watched  # type: ignore[method-assign]


@pytest.mark.parametrize("cache", [None, 1 << 24])
@pytest.mark.parametrize("pipelined", [False, True])
@pytest.mark.parametrize("seed", [1, 2])
def test_no_operation_takes_more_than_there_is(
    model: Any, cache: int | None, pipelined: bool, seed: int
) -> None:
    """Many short rows leave, and a long prompt takes what the batch had beyond what is left of it."""
    dice = random.Random(seed)
    each = cost(model)
    budget = Budget(each, 3 * each.row(1500))
    bench = _Watched(model, budget, cache=cache, pipelined=pipelined, max_running=16)
    shared = [dice.randrange(VOCAB) for _ in range(700)]
    for id in range(60):
        length = int(10 * 140 ** dice.random())
        start = shared[: dice.choice([0, 0, 300, 700])]
        prompt = [*start, *(dice.randrange(VOCAB) for _ in range(length))]
        choices = [Choice(k, k) for k in range(dice.choice([1, 1, 1, 2, 4]))]
        sampling = Sampling(temperature=0.0)
        bench.put(Submit(id, prompt, choices, dice.randint(1, 60), sampling), dice.randint(0, 6))
        if dice.random() < 0.1:
            bench.put(Abort(id))
    bench.engine.turn()
    bench.drain()
    assert not bench.failed
    # With a cache, what sequences share is there once, and counted for each.
    needed = 0.8 if cache is None else 0.5
    assert bench.most > needed * budget.limit, "the budget was never needed: the test is too easy"
    assert not bench.over, bench.over[:5]
    assert bench.pools <= 1.05 * (budget.limit + (cache or 0))
    # Beside it there are logits and what a pass was computed from.
    assert bench.hidden < 0.01 * budget.limit, f"{bench.hidden} beside {budget.limit}"
