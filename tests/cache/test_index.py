"""The index against plain lists: whatever it decides, what is restored is the state of those tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from cache.plain_store import SHAPES, State, Whole, states
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from millrace.cache import merging
from millrace.cache.observations import FoundOnDisk
from millrace.cache.operations import Operation

SALTS = st.sampled_from(["", "a"])
TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=14)
PLENTY = 1 << 30


@pytest.fixture(autouse=True, scope="module")
def small_nodes() -> Iterator[None]:
    """Prompts of a few tokens meet all that happens to prompts of thousands."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(merging, "LEAST", 3)
        patch.setattr(merging, "MOST", 9)
        yield


class PlentyOfMemory(RuleBasedStateMachine):
    """Nothing is ever given up: all that was kept is found, to the token."""

    texts = Bundle("texts")

    @initialize(shape=st.sampled_from(sorted(SHAPES)))
    def start(self, shape: str) -> None:
        self.whole = Whole(shape, PLENTY)
        self.known: set[State] = set()
        self.marks: set[State] = set()

    @rule(target=texts, salt=SALTS, tokens=TOKENS, chunk=st.integers(1, 14), state=st.booleans())
    def keep(self, salt: str, tokens: list[int], chunk: int, state: bool) -> list[int]:
        new = {s for s in states(salt, tokens, 0, len(tokens)) if s not in self.known}
        kept = 0
        for end in [*range(chunk, len(tokens), chunk), len(tokens)]:
            last = end == len(tokens)
            kept += self.whole.keep(salt, tokens[:end], state=state and last, boundary=last)
        assert kept == len(new)
        self.known |= new
        if state:
            self.marks.add((salt, tuple(tokens)))
        return tokens

    @rule(tokens=texts, more=st.lists(st.integers(0, 2), max_size=4), salt=SALTS)
    def find(self, tokens: list[int], more: list[int], salt: str) -> None:
        prompt = tokens + more
        most = max(
            n for n in range(len(prompt)) if not n or (salt, tuple(prompt[:n])) in self.known
        )
        best = most
        if self.whole.needs.uncut:
            places = [n for n in range(most + 1) if (salt, tuple(prompt[:n])) in self.marks]
            best = max(places, default=0)
            window = self.whole.needs.window or 0
            ahead = [m for m in self.marks if m[0] == salt and list(m[1][:most]) == prompt[:most]]
            if most and any(len(m[1]) < window for m in ahead):
                best = most
        assert self.whole.index.known(salt, prompt) == best
        found = self.whole.restore(salt, prompt)
        assert (found.at if found else 0) == best

    @rule()
    def clear(self) -> None:
        out: list[Operation] = []
        self.whole.index.clear(out)
        self.whole.store.execute(out)
        self.known.clear()
        self.marks.clear()

    @invariant()
    def sound(self) -> None:
        if hasattr(self, "whole"):
            self.whole.check()
            covered = sum(len(n.tokens) for n in self.whole.index.nodes)
            assert covered == len(self.known)


class LittleMemory(RuleBasedStateMachine):
    """Things come and go, in memory and on disk: whatever is found is right, and room is kept to."""

    texts = Bundle("texts")

    @initialize(shape=st.sampled_from(sorted(SHAPES)), memory=st.integers(400, 6000))
    def start(self, shape: str, memory: int) -> None:
        self.shape = shape
        self.memory = memory
        self.whole = Whole(shape, memory, PLENTY)
        self.tickets: list[tuple[str, list[int], int]] = []

    @rule(
        target=texts,
        salt=SALTS,
        tokens=TOKENS,
        state=st.booleans(),
        boundary=st.booleans(),
        owner=st.integers(0, 2),
    )
    def keep(
        self, salt: str, tokens: list[int], state: bool, boundary: bool, owner: int
    ) -> tuple[str, list[int]]:
        self.whole.now += 1
        self.whole.keep(salt, tokens, state=state, boundary=boundary, owner=owner)
        return salt, tokens

    @rule(text=texts, more=st.lists(st.integers(0, 2), max_size=4))
    def find(self, text: tuple[str, list[int]], more: list[int]) -> None:
        self.whole.restore(text[0], text[1] + more)

    @rule(text=texts)
    def fetch(self, text: tuple[str, list[int]]) -> None:
        ticket = self.whole.fetch(*text)
        if ticket is not None:
            assert self.whole.index.waits(ticket)
            self.tickets.append((*text, ticket))

    @rule(fails=st.booleans(), gives_up=st.booleans())
    def read(self, fails: bool, gives_up: bool) -> None:
        if gives_up:
            for _, _, ticket in self.tickets:
                self.whole.index.abandon(ticket)
        self.whole.store.finish_reads(fails)
        self.whole.hear()
        for salt, tokens, ticket in self.tickets:
            assert not self.whole.index.waits(ticket)
            self.whole.restore(salt, tokens, ticket)
        self.tickets.clear()
        assert not self.whole.index.loading

    @rule(passed=st.floats(0, 20), idle=st.booleans())
    def tick(self, passed: float, idle: bool) -> None:
        self.whole.now += passed
        self.whole.hear()
        self.whole.tick(idle)

    @rule(pick=st.randoms(use_true_random=False))
    def the_disk_forgets(self, pick: Any) -> None:
        if self.whole.store.disk:
            self.whole.store.drop(pick.choice(sorted(self.whole.store.disk)))
            self.whole.hear()

    @rule()
    def restart(self) -> None:
        """Only what is on disk is left."""
        self.whole.hear()
        out: list[Operation] = []
        self.whole.index.close(out, self.whole.now)
        self.whole.store.execute(out)
        disk = self.whole.store.disk
        self.whole = Whole(self.shape, self.memory, PLENTY)
        self.whole.store.disk = disk
        todo = [id for id, n in disk.items() if not n.parent]
        while todo:
            id = todo.pop()
            node = disk[id]
            todo += [i for i, n in disk.items() if n.parent == id]
            told = FoundOnDisk(
                id, node.parent, node.salt, tuple(node.tokens), node.checkpoint is not None, 5.0
            )
            out = []
            self.whole.index.observe(out, told, self.whole.now)
            assert not out
            if not self.whole.sizes.per_token:
                self.whole.store.segments[id] = node.segment or states(node.salt, *_line(disk, id))
        self.tickets.clear()

    @invariant()
    def sound(self) -> None:
        if hasattr(self, "whole"):
            self.whole.check()


def _line(disk: dict[int, Any], id: int) -> tuple[list[int], int, int]:
    tokens: list[int] = []
    at = id
    while at:
        tokens = disk[at].tokens + tokens
        at = disk[at].parent
    return tokens, len(tokens) - len(disk[id].tokens), len(tokens)


PlentyOfMemory.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
LittleMemory.TestCase.settings = settings(max_examples=300, stateful_step_count=40, deadline=None)
TestPlentyOfMemory = PlentyOfMemory.TestCase
TestLittleMemory = LittleMemory.TestCase
