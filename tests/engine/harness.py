"""An engine driven turn by turn in the test's own thread, and the plain loop it is held against."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from millrace.cache.index import PrefixIndex
from millrace.cache.state import measured_sizes
from millrace.cache.store import SegmentStore
from millrace.config import EngineConfig
from millrace.engine.assembly import NO_LIMIT, assemble
from millrace.engine.grammar import Grammars
from millrace.engine.measure import cost_of
from millrace.engine.memory import Budget, StateCost
from millrace.engine.runner import Runner
from millrace.engine.sampler import Sampler
from millrace.engine.sampling import HostSampling, SamplingBackend
from millrace.engine.specprefill.draft import DraftModel
from millrace.engine.transport import ThreadTransport
from millrace.engine.turn import Seen, Turn, encoder
from millrace.models.load import WARM_UP_TOKENS
from millrace.protocol import (
    AdapterAnswer,
    AdapterLoaded,
    AdapterRefused,
    AdapterUnloaded,
    Failed,
    FromEngine,
    Picture,
    Prefilled,
    Step,
    Submit,
    ToEngine,
    TokenLogprob,
)
from millrace.protocol.specprefill import Scoring, Selected

Key = tuple[int, int]


class Bench:
    """What the engine said, gathered by row."""

    def __init__(
        self,
        model: Any,
        backend: SamplingBackend | None = None,
        budget: Budget | None = None,
        cache: int | None = None,
        disk: Any = None,
        pipelined: bool = False,
        recurring: bool = False,
        grammars: Grammars | None = None,
        vocabulary: int | None = None,
        picture_room: int = NO_LIMIT,
        draft: Any = None,
        draft_room: int = 1 << 40,
        draft_cache: int = 1 << 30,
        draft_vocabulary: int | None = None,
        **config: Any,
    ) -> None:
        """`cache` is the prefix cache's memory in bytes; None goes without. `draft` is a second model."""
        self.model = model
        self.generated: dict[Key, list[int]] = {}
        self.finish: dict[Key, str] = {}
        self.failed: dict[int | None, Failed] = {}
        self.prefilled: dict[int, int] = {}
        self.logprobs: dict[Key, list[TokenLogprob]] = {}
        self.prompt_logprobs: dict[int, list[TokenLogprob]] = {}
        self.adapters: dict[int, AdapterAnswer] = {}
        self.transport = ThreadTransport(self._deliver)
        settings = EngineConfig(model="tiny", name="tiny", **config)
        sampler = Sampler(backend or HostSampling())
        self.found: dict[int, Prefilled] = {}
        beside: DraftModel | None = None
        if draft is not None:
            caches = make_prompt_cache(draft)
            mx.eval(draft(mx.array([[0]], mx.int32), cache=caches))
            chunk = settings.prefill_chunk or 512
            beside = DraftModel(
                draft,
                caches,
                target=model,
                chunk=chunk,
                room=draft_room,
                cached=draft_cache,
                recurring=recurring,
                vocabulary=draft_vocabulary,
            )
        self.selected: dict[int, Selected] = {}
        self.scoring: list[Scoring] = []
        runner = Runner(model, recurring=recurring)
        cost = replace(runner.cost, chunk=settings.prefill_chunk or 512)
        self.budget = Budget(cost, budget.limit if budget else 1 << 40)
        self.cache: PrefixIndex | None = None
        self.store: SegmentStore | None = None
        if cache is not None:
            pack = settings.cache_quant
            segments = runner.segments(pack=pack)
            self.store = SegmentStore(runner.make_caches, runner.layout, disk, segments)
            self.cache = PrefixIndex(
                runner.layout.needs,
                runner.sizes(measured_sizes(model, runner.layout, pack), pack=pack),
                cache,
                disk_budget=disk.budget if disk else None,
            )
        self.journal: list[tuple[bytes, bytes]] = []
        """What was seen and what was decided, turn by turn."""
        self.pixels: list[bytes] = []
        """The pictures that came before each turn."""
        self.engine = assemble(
            runner,
            settings,
            sampler,
            self.budget,
            self.transport,
            pipelined=pipelined,
            grammars=grammars,
            index=self.cache,
            store=self.store,
            journal=self._note,
            vocabulary=vocabulary,
            picture_room=picture_room,
            draft=beside,
        )

    def _note(self, seen: Seen, turn: Turn, pictures: list[Picture]) -> None:
        self.journal.append((encoder.encode(seen), encoder.encode(turn)))
        self.pixels.append(encoder.encode(pictures))

    def _deliver(self, message: FromEngine) -> None:
        match message:
            case Step(rows=rows, prefilled=prefilled, prompt_logprobs=prompts):
                self.prompt_logprobs |= {p.id: p.items for p in prompts}
                self.selected |= {s.id: s for s in message.selected}
                self.scoring += message.scoring
                for row in rows:
                    key = (row.id, row.choice)
                    assert key not in self.finish, "a token after the end"
                    self.generated.setdefault(key, []).extend(row.tokens)
                    self.logprobs.setdefault(key, []).extend(row.logprobs)
                    if row.finish:
                        self.finish[key] = row.finish
                for part in prefilled:
                    self.prefilled[part.id] = part.done
                    self.found[part.id] = part
            case Failed(id=id):
                self.failed[id] = message
            case AdapterLoaded(slot=slot) | AdapterRefused(slot=slot) | AdapterUnloaded(slot=slot):
                self.adapters[slot] = message

    def put(self, message: ToEngine, turns: int = 0) -> None:
        self.transport.put(message)
        for _ in range(turns):
            self.turn()

    def turn(self) -> None:
        """One turn; what the decider counts is never less than what the executor holds."""
        self.engine.turn()
        decider, executor = self.engine._decider, self.engine._executor
        assert executor.nbytes <= decider.held, (executor.nbytes, decider.held)
        assert decider.held <= self.budget.limit, (decider.held, self.budget.limit, decider.state())

    @property
    def idle(self) -> bool:
        return not self.engine.busy

    def drain(self, limit: int = 20_000) -> None:
        for _ in range(limit):
            if self.idle:
                return
            self.turn()
        raise AssertionError("the engine does not come to rest")

    def run(self, submits: Iterable[Submit], turns: int = 0) -> dict[Key, list[int]]:
        for submit in submits:
            self.put(submit, turns)
        self.turn()
        self.drain()
        return self.generated


def cost(model: Any) -> StateCost:
    caches = make_prompt_cache(model)
    mx.eval(model(mx.array([[1] * WARM_UP_TOKENS], mx.int32), cache=caches))
    return cost_of(caches)


def greedy_alone(model: Any, prompt: list[int], count: int) -> list[int]:
    """The oracle: one row, plain caches, argmax."""
    caches = make_prompt_cache(model)
    tokens = list(prompt)
    fed = mx.array([tokens], mx.int32)
    out: list[int] = []
    for _ in range(count):
        logits = model(fed, cache=caches)[0, -1]
        out.append(int(mx.argmax(logits)))
        fed = mx.array([[out[-1]]], mx.int32)
    return out
