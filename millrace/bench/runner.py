"""One benchmark run: for every level, rounds that alternate over the targets, after a warm-up.

It fills a `Results` as samples come in, so that whoever interrupts it has what was gathered.
"""

from __future__ import annotations

from collections.abc import Callable

import httpx
import msgspec

from millrace.bench.discover import calibrate, with_model
from millrace.bench.interleave import rounds_for, turns
from millrace.bench.load import Wire, closed_loop, make_client, open_loop
from millrace.bench.samples import BenchTarget, Level, RequestSample, Results
from millrace.bench.workload import Item, WorkloadShape, generate, poisson, split
from millrace.errors import SetupError

_WARMUP = -1


class RunPlan(msgspec.Struct, frozen=True, kw_only=True):
    """All that a run is told."""

    targets: list[BenchTarget]
    levels: list[Level]
    shape: WorkloadShape
    wire: Wire
    requests: int
    """Per level and target."""
    trace: list[Item] | None = None
    warmup: int = 1
    rounds: int | None = None
    seed: int = 0
    calibrate: bool = False

    @property
    def total(self) -> int:
        return len(self.targets) * (self.warmup + len(self.levels) * self.requests)


Watch = Callable[[str, RequestSample | None], None]
"""Told what is under way, and each sample as it ends."""


async def run(plan: RunPlan, results: Results, watch: Watch) -> None:
    async with make_client() as http:
        for i, target in enumerate(plan.targets):
            results.targets[i] = await with_model(http, target)
        for i, cell in enumerate(results.cells):
            cell.target = results.targets[i % len(results.targets)]
        shape = plan.shape
        if plan.calibrate:
            watch("calibrating prompts", None)
            sizing = await calibrate(http, results.targets[0], plan.wire, plan.seed)
            shape = msgspec.structs.replace(shape, sizing=sizing)
        for target in results.targets:
            await _warm_up(http, plan, shape, target, watch)
        for i, level in enumerate(plan.levels):
            await _measure(http, plan, shape, i, level, results, watch)


async def _warm_up(
    http: httpx.AsyncClient, plan: RunPlan, shape: WorkloadShape, target: BenchTarget, watch: Watch
) -> None:
    """A target that fails every warm-up request would fail the run; say so before it starts."""
    if not plan.warmup:
        return
    what = f"warm-up · {target.name}"
    watch(what, None)
    samples: list[RequestSample] = []

    def record(sample: RequestSample) -> None:
        samples.append(sample)
        watch(what, sample)

    items = generate(shape, plan.warmup, plan.seed, "warmup")
    together = max((level.clients or 1) for level in plan.levels)
    await closed_loop(
        http, target, plan.wire, items, clients=together, number=_WARMUP, record=record
    )
    last = samples[-1].failure
    if last is not None and not any(sample.ok for sample in samples):
        raise SetupError(
            f"Target {target.name} ({target.url}) failed every warm-up request: "
            f"{last.label}: {last.message}"
        )


async def _measure(
    http: httpx.AsyncClient,
    plan: RunPlan,
    shape: WorkloadShape,
    index: int,
    level: Level,
    results: Results,
    watch: Watch,
) -> None:
    items = _items(plan, shape, index, level)
    wanted = plan.rounds or rounds_for(len(items), level.clients, len(plan.targets))
    parts = split(items, wanted)
    row = results.row(index)
    for number, which in turns(len(row), len(parts)):
        cell, part = row[which], parts[number]
        what = f"{level.label} · {cell.target.name}"
        watch(what, None)

        def record(
            sample: RequestSample, samples: list[RequestSample] = cell.samples, what: str = what
        ) -> None:
            samples.append(sample)
            watch(what, sample)

        if level.clients is None:
            await open_loop(http, cell.target, plan.wire, part, number=number, record=record)
        else:
            await closed_loop(
                http,
                cell.target,
                plan.wire,
                part,
                clients=level.clients,
                number=number,
                record=record,
            )


def _items(plan: RunPlan, shape: WorkloadShape, index: int, level: Level) -> list[Item]:
    """The level's requests: the same for every target, and other prompts at every level."""
    stream = f"level{index}"
    if plan.trace is not None:
        items = plan.trace[: plan.requests]
    else:
        items = generate(shape, plan.requests, plan.seed, stream)
    if level.rate is not None:
        return poisson(items, level.rate, plan.seed, stream)
    return items
