"""What the parity matrix asks of every shape: each column is one way to run, held against the plain loop.

A column returns None where the tokens are right, and raises AssertionError where they are not; a word
it returns instead says why it does not apply to the shape.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
from adapters_help import linear_shapes, merge, random_pairs, write_mlx
from cache.disk_bench import tier
from engine.following import Leading, follower_of
from engine.harness import Bench, greedy_alone
from engine.preempted import Witness
from paging.own_kinds import OWN_KINDS
from tiny import VOCAB

from millrace.engine.memory import Budget
from millrace.engine.ranks.order import Close, checksum, from_leader
from millrace.engine.sampling import DeviceSampling
from millrace.engine.scheduler import GROWTH
from millrace.engine.speculation import Speculation
from millrace.errors import ModelError
from millrace.protocol import AdapterLoaded, Choice, LoadAdapter, Sampling, Submit
from millrace.protocol.specprefill import SparsePrefill

GREEDY = Sampling(temperature=0.0)
DRAWN = Sampling(temperature=0.9, top_p=0.9, top_k=40)
COUNT = 8
PLENTY = 1 << 28
REFUSED = "refused"
"""The server says so at the start."""
NONE = "none"
"""Nothing of the kind is done for the shape."""


class Subject:
    """A tiny model of one shape, its prompts, and their answers by the plain loop."""

    def __init__(self, shape: str) -> None:
        self.shape = shape
        self.model = self.fresh()
        dice = random.Random(3)
        phrase = [dice.randrange(VOCAB) for _ in range(6)]
        self.prompts = [
            [*phrase, *(dice.randrange(VOCAB) for _ in range(n)), *phrase, *phrase[:2]]
            for n in (5, 29, 1, 17)
        ]
        self.expected = {
            (i, 0): greedy_alone(self.model, prompt, COUNT) for i, prompt in enumerate(self.prompts)
        }

    def fresh(self) -> Any:
        return tiny.build(self.shape, **OWN_KINDS.get(self.shape, {}))

    def submits(self, sampling: Sampling = GREEDY, **more: Any) -> list[Submit]:
        return [
            Submit(i, prompt, [Choice(0, 40 + i)], COUNT, sampling, **more)
            for i, prompt in enumerate(self.prompts)
        ]

    def drawn(self) -> dict[tuple[int, int], list[int]]:
        """What each request draws by itself."""
        found = {}
        for submit in self.submits(DRAWN):
            found |= Bench(self.model).run([submit])
        return found


def batched(subject: Subject, folder: Path) -> str | None:
    """Rows that come while others run."""
    bench = Bench(subject.model, prefill_chunk=13, max_running=3)
    assert bench.run(subject.submits(), turns=2) == subject.expected
    return None


def seeded(subject: Subject, folder: Path) -> str | None:
    """Draws above temperature 0."""
    bench = Bench(subject.model, prefill_chunk=13)
    assert bench.run(subject.submits(DRAWN), turns=1) == subject.drawn()
    return None


def pipelined(subject: Subject, folder: Path) -> str | None:
    """As on a GPU: a step is launched before the last one's tokens are known."""
    more: dict[str, Any] = {"pipelined": True, "recurring": True, "prefill_chunk": 13}
    bench = Bench(subject.model, DeviceSampling(), **more)
    assert bench.run(subject.submits(), turns=2) == subject.expected
    bench = Bench(subject.model, DeviceSampling(), **more)
    assert bench.run(subject.submits(DRAWN), turns=1) == subject.drawn()
    return None


class _Eager(Speculation):
    """Tries whatever it can, right or wrong."""

    tried = False

    def _counts(self, rows: Any, drafters: Any, planned: Any, most: Any) -> list[int]:
        counts = [len(d.draft.tokens) if d is not None else 0 for d in drafters]
        self.tried |= any(counts)
        return counts


def drafted(subject: Subject, folder: Path) -> str | None:
    """Draft tokens from what a row's context repeats."""
    for sampling, expected in ((GREEDY, subject.expected), (DRAWN, subject.drawn())):
        bench = Bench(subject.model, speculate=4)
        decider = bench.engine._decider
        if decider._speculation is None:
            return NONE
        decider._speculation = eager = _Eager(4, decider._pacing)
        assert bench.run(subject.submits(sampling), turns=1) == expected
    return None if eager.tried else NONE


def several(subject: Subject, folder: Path) -> str | None:
    """Several choices of one prompt share its state."""
    choices = [Choice(k, 7 + k) for k in range(3)]
    submit = Submit(0, subject.prompts[1], choices, COUNT, DRAWN)
    together = Bench(subject.model, prefill_chunk=13).run([submit])
    for choice in choices:
        alone = Bench(subject.model).run([Submit(0, subject.prompts[1], [choice], COUNT, DRAWN)])
        assert together[0, choice.index] == alone[0, choice.index]
    return None


def cached(subject: Subject, folder: Path) -> str | None:
    """A conversation's second turn finds the state of the first."""
    bench = Bench(subject.model, cache=PLENTY, prefill_chunk=16, checkpoint_every=32)
    bench.run(subject.submits(), turns=1)
    prompt = [*subject.prompts[1], *bench.generated[1, 0], 5, 6, 7]
    assert bench.run([Submit(9, prompt, [Choice(0, 1)], COUNT, GREEDY)])[9, 0] == greedy_alone(
        subject.model, prompt, COUNT
    )
    assert bench.found[9].cached >= len(subject.prompts[1])
    return None


def on_disk(subject: Subject, folder: Path) -> str | None:
    """Another engine finds it on disk."""
    for id in (1, 2):
        disk = tier(folder / "prefixes")
        bench = Bench(subject.model, cache=PLENTY, disk=disk, prefill_chunk=16)
        prompt = subject.prompts[1]
        submit = Submit(id, prompt, [Choice(0, 1)], COUNT, GREEDY)
        assert bench.run([submit])[id, 0] == subject.expected[1, 0]
        bench.engine._close()
    assert bench.found[2].cached >= len(prompt) - 1
    return None


def preempted(subject: Subject, folder: Path) -> str | None:
    """Rows that give way to others run again."""
    count = 2 * GROWTH
    prompts = subject.prompts[:2]
    cost = Bench(subject.model, prefill_chunk=16).budget.cost
    starts = [cost.row(len(prompt) + GROWTH) for prompt in prompts]
    ends = [cost.row(len(prompt) + count) for prompt in prompts]
    budget = Budget(cost, max(*ends, sum(starts)))
    bench = Witness(subject.model, budget=budget, prefill_chunk=16, cache=PLENTY)
    generated = bench.run(
        Submit(i, prompt, [Choice(0, i)], count, GREEDY, priority=i % 2)
        for i, prompt in enumerate(prompts)
    )
    for i, prompt in enumerate(prompts):
        assert generated[i, 0] == greedy_alone(subject.model, prompt, count)
    if not cost.per_token or starts == ends:
        return NONE
    assert bench.again, "nothing was pre-empted"
    return None


def resumed(subject: Subject, folder: Path) -> str | None:
    """An answer that goes on in another engine."""
    for (id, _), whole in subject.drawn().items():
        for cut in (1, COUNT - 1):
            choice = Choice(0, 40 + id, whole[:cut])
            submit = Submit(id, subject.prompts[id], [choice], COUNT, DRAWN)
            assert Bench(subject.model).run([submit])[id, 0] == whole[cut:]
    return None


def scored(subject: Subject, folder: Path) -> str | None:
    """Logprobs of prompt and answer, a row alone and among others."""
    asked = subject.submits(logprobs=1, prompt_logprobs=1)
    together = Bench(subject.model, prefill_chunk=13)
    assert together.run(asked, turns=2) == subject.expected
    for submit in asked:
        alone = Bench(subject.model)
        alone.run([submit])
        for ours, theirs in (
            (together.logprobs[submit.id, 0], alone.logprobs[submit.id, 0]),
            (together.prompt_logprobs[submit.id], alone.prompt_logprobs[submit.id]),
        ):
            plain = [item.logprob for item in theirs]
            assert [item.logprob for item in ours] == pytest.approx(plain, abs=1e-3)
    return None


def on_ranks(subject: Subject, folder: Path) -> str | None:
    """A rank that follows comes to the same state, turn by turn."""
    first = Leading(subject.model, prefill_chunk=13, cache=PLENTY)
    assert first.run(subject.submits(), turns=2) == subject.expected
    second = follower_of(subject.model)
    for raw in first.orders:
        assert second.obey(from_leader.decode(raw))
    assert not second.obey(Close(first.engine._outcome.rows, check=checksum(first.engine.state())))
    assert second.checks == len(first.orders) + 1
    return None


def adapted(subject: Subject, folder: Path) -> str | None:
    """A row with an adapter among rows without one."""
    pairs = random_pairs(linear_shapes(subject.fresh()))
    write_mlx(folder / "adapter", pairs, 0.7)
    bench = Bench(subject.fresh(), prefill_chunk=13)
    bench.put(LoadAdapter(1, "adapter", str(folder / "adapter")))
    while 1 not in bench.adapters:
        bench.turn()
    if not isinstance(bench.adapters[1], AdapterLoaded):
        return REFUSED
    other = subject.fresh()
    merge(other, pairs, 0.7)
    asked = subject.submits()
    asked[1].adapter = 1
    expected = subject.expected | {(1, 0): greedy_alone(other, subject.prompts[1], COUNT)}
    assert bench.run(asked, turns=1) == expected
    return None


def sparse(subject: Subject, folder: Path) -> str | None:
    """A long prompt in parts that have positions of their own, with nothing left out."""
    model = subject.fresh()
    prompt = (subject.prompts[1] * 20)[:700]
    dense = Bench(subject.model).run([Submit(0, prompt, [Choice(0, 1)], COUNT, GREEDY)])
    try:
        bench = Bench(model, draft=subject.fresh())
    except ModelError:
        return REFUSED
    sparse = SparsePrefill(1.0, kept=[(0, 40), (40, 700)])
    submit = Submit(0, prompt, [Choice(0, 1)], COUNT, GREEDY, sparse=sparse)
    assert bench.run([submit]) == dense
    return None


COLUMNS: dict[str, Callable[[Subject, Path], str | None]] = {
    "batched": batched,
    "by seed": seeded,
    "pipelined": pipelined,
    "drafts": drafted,
    "n > 1": several,
    "cached": cached,
    "from disk": on_disk,
    "pre-empted": preempted,
    "resumed": resumed,
    "logprobs": scored,
    "ranks": on_ranks,
    "adapters": adapted,
    "SpecPrefill": sparse,
}
