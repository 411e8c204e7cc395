"""The warm-up: what it runs is what requests run later, and it leaves nothing behind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import pytest
import tiny

from millrace.engine.batch import Batch
from millrace.engine.ranks.executors import FollowingBatch
from millrace.engine.row import Row
from millrace.engine.runner import Runner
from millrace.engine.sampler import Draw, Sampler
from millrace.engine.sampling import DeviceSampling, HostSampling, SamplingBackend
from millrace.engine.warmup import warm_up
from millrace.models.splitting import behead


@pytest.mark.parametrize("backend", [DeviceSampling, HostSampling])
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_every_way_of_drawing_is_tried_and_none_fails(
    backend: type[SamplingBackend], rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a draw failed, and its rows were drawn one by one")

    monkeypatch.setattr(Batch, "_sample_alone", refuse)
    drawn: list[int] = []
    draw = Sampler.draw

    def counted(self: Sampler, logits: mx.array, rows: Sequence[Row]) -> Draw:
        drawn.append(len(rows))
        return draw(self, logits, rows)

    monkeypatch.setattr(Sampler, "draw", counted)
    runner = Runner(tiny.build("llama"), recurring=True)
    warm_up(runner, Sampler(backend()), rows, 64)
    assert set(drawn) >= {1, rows}
    assert not runner._sequences and not runner.nbytes


@pytest.mark.parametrize("shape", ["llama", "qwen3_next"])
def test_all_ranks_run_the_same_passes(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In each of them a group's ranks wait for one another."""
    passes: list[object] = []
    run = Runner.run

    def noted(self: Runner, tokens: mx.array, runs: Any, wanted: Any, **more: Any) -> Any:
        passes.append((tokens.shape, list(runs), list(wanted), more))
        return run(self, tokens, runs, wanted, **more)

    monkeypatch.setattr(Runner, "run", noted)
    seen: list[list[object]] = []
    for batch, backend in ((Batch, DeviceSampling), (FollowingBatch, HostSampling)):
        model = tiny.build(shape)
        if batch is FollowingBatch:
            behead(model)
        warm_up(Runner(model, recurring=True), Sampler(backend()), 4, 32, batch)
        seen.append(list(passes))
        passes.clear()
    assert seen[0] == seen[1] and seen[0]
