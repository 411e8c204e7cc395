"""A pass that fails runs again in parts, from where its sequences were."""

from __future__ import annotations

from typing import Any

import pytest
from engine.harness import Bench, greedy_alone
from tiny import VOCAB, build

from millrace.engine.runner import Runner
from millrace.protocol import Choice, Sampling, Submit

GREEDY = Sampling(temperature=0.0)


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
@pytest.mark.parametrize("late", [False, True], ids=["before", "after it was launched"])
def test_tokens_are_those_of_each_alone(
    kind: str, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(kind)
    prompts = [[(7 * i + 3 * k) % VOCAB for k in range(9 + 8 * i)] for i in range(4)]
    failed: list[int] = []
    run = Runner.run

    def broken(self: Runner, tokens: Any, runs: Any, *rest: Any, **more: Any) -> Any:
        several = len(runs) > 1 and any(each.count > 1 for each in runs)
        if several and not late:
            failed.append(len(runs))
            raise RuntimeError("out of memory")
        found = run(self, tokens, runs, *rest, **more)
        if several:
            failed.append(len(runs))
            raise RuntimeError("out of memory")
        return found

    monkeypatch.setattr(Runner, "run", broken)
    bench = Bench(model, prefill_chunk=6)
    submits = [Submit(i, p, [Choice(0, i)], 24, GREEDY) for i, p in enumerate(prompts)]
    generated = bench.run(submits, turns=3)
    assert failed and not bench.failed
    for i, prompt in enumerate(prompts):
        assert generated[i, 0] == greedy_alone(model, prompt, 24)
