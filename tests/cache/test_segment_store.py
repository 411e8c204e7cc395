"""The index and the store together on real caches: what is counted is what is held, and what is
restored is what a cold run has, from memory and from disk."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from cache.disk_bench import PATIENCE, tier
from cache.plain_segments import pairs_of
from mlx_lm.models.cache import make_prompt_cache
from tiny import SHAPES, VOCAB, build

from millrace.cache.disk import DiskTier
from millrace.cache.index import PrefixIndex
from millrace.cache.operations import Keep, KeepState, Operation, Source
from millrace.cache.segments import CopiedSegments
from millrace.cache.state import (
    Layout,
    RestoredState,
    StateCheckpoint,
    checkpoint_of,
    measured_sizes,
)
from millrace.cache.store import SegmentStore, StateLost

JOB = Source("prefill", 1)


@pytest.fixture(scope="module", params=list(SHAPES))
def model(request: pytest.FixtureRequest) -> Any:
    return build(request.param)


class Alone:
    """A single row's caches, as a source."""

    def __init__(self, model: Any, layout: Layout) -> None:
        self._model = model
        self._layout = layout
        self.caches = make_prompt_cache(model)

    def run(self, tokens: list[int]) -> mx.array:
        logits = self._model(mx.array([tokens], mx.int32), cache=self.caches)[0, -1]
        mx.eval(logits)
        return logits

    def pairs(self, start: int, end: int) -> list[tuple[mx.array, mx.array]]:
        return pairs_of(self._layout, self.caches, start, end)

    def pages(self, start: int, end: int) -> list[int]:
        raise NotImplementedError

    def checkpoint(self) -> StateCheckpoint:
        return checkpoint_of(self._layout, self.caches)


class Real:
    def __init__(
        self, model: Any, memory: int, disk: DiskTier | None = None, pack: bool = False
    ) -> None:
        self.model = model
        self.layout = Layout.of(model)
        copies = CopiedSegments(pack=pack)
        self.store = SegmentStore(lambda: make_prompt_cache(model), self.layout, disk, copies)
        sizes = measured_sizes(model, self.layout, pack)
        budget = disk.budget if disk else None
        self.index = PrefixIndex(self.layout.needs, sizes, memory, disk_budget=budget)
        self.now = 0.0
        self.loses: Callable[[], bool] = lambda: False
        for found in self.store.found():
            self.index.observe([], found, 0.0)

    def do(self, out: list[Operation], source: Alone | None = None) -> RestoredState | None:
        state: RestoredState | None = None
        for operation in out:
            if isinstance(operation, (Keep, KeepState)) and self.loses():
                self.store.lose(operation)
            else:
                state = self.store.execute(operation, source) or state
        return state

    def run(self, prompt: list[int], rng: random.Random, pauses: list[int]) -> None:
        """Run a prompt in chunks, keeping all of it but the last token."""
        row = Alone(self.model, self.layout)
        done = 0
        while done < len(prompt) - 1:
            ends = [p for p in (*pauses, len(prompt) - 1) if p > done]
            end = min(done + rng.randrange(1, 20), *ends)
            row.run(prompt[done:end])
            done = end
            out: list[Operation] = []
            state = done in pauses or done == len(prompt) - 1
            self.now += 0.1
            self.index.keep(out, JOB, "", prompt[:done], state=state, boundary=state, now=self.now)
            self.do(out, row)
            self.hear()
            self.check()

    def hear(self) -> None:
        for event in self.store.poll():
            out: list[Operation] = []
            self.index.observe(out, event, self.now)
            self.do(out)

    def write(self) -> None:
        for _ in range(3):
            self.now += 10
            out: list[Operation] = []
            self.index.tick(out, self.now, idle=True)
            self.do(out)
            self.hear()

    def restored(self, prompt: list[int]) -> tuple[int, mx.array]:
        """How many tokens were found, and the logits after the rest has been run."""
        out: list[Operation] = []
        ticket = self.index.fetch(out, "", prompt)
        self.do(out)
        deadline = time.monotonic() + PATIENCE
        while self.index.waits(ticket) and time.monotonic() < deadline:
            self.hear()
        out = []
        found = self.index.restore(out, 1, "", prompt, ticket, self.now)
        state = self.do(out)
        self.check()
        row = Alone(self.model, self.layout)
        if found:
            assert state is not None
            row.caches = state.caches
        return (found.at if found else 0), row.run(prompt[found.at if found else 0 :])

    def check(self) -> None:
        self.index.check()
        assert self.index.state_bytes == self.store.nbytes


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(1, VOCAB) for _ in range(count)]


def _cold(real: Real, prompt: list[int]) -> mx.array:
    return Alone(real.model, real.layout).run(prompt)


@pytest.mark.parametrize("pack", [False, True])
def test_what_is_counted_is_held_and_what_is_found_is_right(
    model: Any, pack: bool, tmp_path: Path
) -> None:
    rng = random.Random(7)
    disk = tier(tmp_path, sync=False)
    real = Real(model, 1 << 26, disk, pack)
    head = _tokens(rng, 40)
    prompts = [[*head, *_tokens(rng, rng.randrange(2, 60))] for _ in range(4)]
    for prompt in prompts:
        real.run(prompt, rng, [20, 40])
        real.write()
    within = 0.5 if pack else 1e-4

    def same(real: Real, prompt: list[int], least: int) -> None:
        at, logits = real.restored(prompt)
        assert at >= least
        assert np.allclose(np.array(logits), np.array(_cold(real, prompt)), atol=within)

    for prompt in prompts:
        same(real, prompt, len(prompt) - 1)
        same(real, [*prompt[:-1], 1, 2, 3], len(prompt) - 1)
    same(real, [*head, 5, 6, 7], 40)
    out: list[Operation] = []
    real.index.close(out, real.now)
    real.store.close(out, 10)
    again = Real(model, 1 << 26, tier(tmp_path, sync=False), pack)
    again.check()
    for prompt in prompts:
        same(again, prompt, len(prompt) - 1)
    again.store.close([], 5)


def test_a_small_memory_gives_and_takes(model: Any, tmp_path: Path) -> None:
    rng = random.Random(8)
    disk = tier(tmp_path, sync=False)
    real = Real(model, 60_000, disk)
    head = _tokens(rng, 20)
    prompts = [[*head, *_tokens(rng, rng.randrange(2, 80))] for _ in range(10)]
    for prompt in prompts:
        real.run(prompt, rng, [20])
        real.hear()
        other = rng.choice(prompts)
        _, logits = real.restored(other)
        assert np.allclose(np.array(logits), np.array(_cold(real, other)), atol=1e-4)
    out: list[Operation] = []
    real.index.clear(out)
    real.do(out)
    real.check()
    assert real.store.nbytes == real.index.nbytes == 0
    real.store.close([], 5)


def test_sources_that_fail_leave_nothing_wrong(model: Any, tmp_path: Path) -> None:
    rng = random.Random(9)
    real = Real(model, 80_000, tier(tmp_path, sync=False))
    real.loses = lambda: rng.random() < 0.3
    head = _tokens(rng, 20)
    for number in range(12):
        prompt = [*head, *_tokens(rng, rng.randrange(2, 60))]
        real.run(prompt, rng, [20, 30])
        if number % 3 == 0:
            real.write()
        _, logits = real.restored(prompt)
        assert np.allclose(np.array(logits), np.array(_cold(real, prompt)), atol=1e-4)
    real.loses = lambda: False
    real.run(prompt, rng, [20, 30])
    assert real.restored(prompt)[0] == len(prompt) - 1
    real.store.close([], 5)


def test_state_that_was_lost_in_the_same_breath_cannot_be_restored(model: Any) -> None:
    real = Real(model, 1 << 26)
    row = Alone(model, real.layout)
    row.run([1, 2, 3])
    out: list[Operation] = []
    real.index.keep(out, JOB, "", [1, 2, 3], state=True, boundary=True, now=0.0)
    real.index.restore(out, 1, "", [1, 2, 3, 4], None, 0.0)
    for operation in out[:-1]:
        assert isinstance(operation, (Keep, KeepState))
        real.store.lose(operation)
    with pytest.raises(StateLost):
        real.store.execute(out[-1])
    real.hear()
    real.check()
    assert real.index.known("", [1, 2, 3, 4]) == 0
