"""The tree against a plain dictionary of everything ever put in, checked after every operation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from millrace.cache.policy import victims, worth
from millrace.cache.tree import Node, Tree, shared

SALTS = st.sampled_from(["", "a"])
TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=12)


@dataclass
class Run:
    """A segment that knows which tokens it is the state of, and after which."""

    states: list[tuple[int, ...]]

    @property
    def nbytes(self) -> int:
        return 100 * len(self.states)

    def cut(self, start: int, end: int) -> Run:
        return Run(self.states[start:end])


@dataclass
class Mark:
    prefix: tuple[int, ...]
    nbytes: int = 70


def _state(tokens: list[int], start: int, end: int) -> Run:
    return Run([tuple(tokens[: i + 1]) for i in range(start, end)])


class TreeAgainstDictionary(RuleBasedStateMachine):
    """`known` holds every prefix that must be found; disk-only nodes count as found."""

    texts = Bundle("texts")

    def __init__(self) -> None:
        super().__init__()
        self.tree: Tree[Run, Mark] = Tree(self._split)
        self.known: set[tuple[str, tuple[int, ...]]] = set()
        self.disk: dict[int, Run] = {}
        self.now = 0.0

    def _split(self, node: Node[Run, Mark], upper: Node[Run, Mark]) -> None:
        if node.stored:
            both = self.disk[node.id]
            at = len(upper.tokens)
            self.disk[upper.id], self.disk[node.id] = (
                both.cut(0, at),
                both.cut(at, len(both.states)),
            )

    @rule(target=texts, salt=SALTS, tokens=TOKENS, mark=st.booleans())
    def insert(self, salt: str, tokens: list[int], mark: bool) -> tuple[str, list[int]]:
        self.now += 1
        node = self.tree.insert(salt, tokens, lambda a, b: _state(tokens, a, b), self.now)
        assert node.end == len(tokens)
        if mark:
            self.tree.set_checkpoint(node, Mark(tuple(tokens)), boundary=True)
        self.known |= {(salt, tuple(tokens[: i + 1])) for i in range(len(tokens))}
        return salt, tokens

    @rule(text=texts, more=st.lists(st.integers(0, 2), max_size=4), salt=SALTS)
    def match(self, text: tuple[str, list[int]], more: list[int], salt: str) -> None:
        tokens = text[1] + more
        found = self.tree.match(salt, tokens)
        best = max(
            n for n in range(len(tokens) + 1) if not n or (salt, tuple(tokens[:n])) in self.known
        )
        assert found.length == best
        states = [s for n in found.nodes for s in self._run(n).states][:best]
        assert states == [tuple(tokens[: i + 1]) for i in range(best)]

    def _run(self, node: Node[Run, Mark]) -> Run:
        return node.segment if node.segment is not None else self.disk[node.id]

    @rule(pick=st.randoms(use_true_random=False))
    def write(self, pick: Any) -> None:
        if nodes := [n for n in self.tree.nodes.values() if n.segment and not n.stored]:
            node = pick.choice(nodes)
            self.disk[node.id] = node.segment
            node.stored = True

    @rule(needed=st.integers(1, 900))
    def evict(self, needed: int) -> None:
        before = self.tree.nbytes
        for node, part in list(victims(self.tree.nodes.values(), self.now, needed)):
            if node.id not in self.tree.nodes:
                continue
            if part == "checkpoint":
                self.tree.drop_checkpoint(node)
            elif node.stored:
                self.tree.drop_segment(node)
            else:
                self._forget(node)
        assert self.tree.nbytes <= before

    @rule(pick=st.randoms(use_true_random=False))
    def restore(self, pick: Any) -> None:
        if nodes := [n for n in self.tree.nodes.values() if n.segment is None]:
            node = pick.choice(nodes)
            self.tree.fill(node, self.disk[node.id])

    @rule(pick=st.randoms(use_true_random=False))
    def forget(self, pick: Any) -> None:
        if self.tree.nodes:
            self._forget(pick.choice(list(self.tree.nodes.values())))

    def _forget(self, node: Node[Run, Mark]) -> None:
        salt = self.tree.salt_of(node)
        prefix = [t for n in node.line() for t in n.tokens]
        start = tuple(prefix[: node.start + 1])
        self.tree.remove(node)
        size = len(start)
        self.known = {k for k in self.known if k[0] != salt or k[1][:size] != start}

    @rule()
    def clear(self) -> None:
        self.tree.clear()
        self.known.clear()

    @invariant()
    def whole(self) -> None:
        self.tree.check()
        for node in self.tree.nodes.values():
            prefix = [t for n in node.line() for t in n.tokens]
            assert self._run(node).states == _state(prefix, node.start, node.end).states
            if node.checkpoint is not None:
                assert node.checkpoint.prefix == tuple(prefix)


TreeAgainstDictionary.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None
)
TestTreeAgainstDictionary = TreeAgainstDictionary.TestCase


@given(st.lists(st.integers(0, 1), max_size=30), st.lists(st.integers(0, 1), max_size=40))
def test_shared_counts_to_the_first_difference(run: list[int], tokens: list[int]) -> None:
    for offset in range(len(tokens) + 1):
        plain = 0
        for a, b in zip(run, tokens[offset:], strict=False):
            if a != b:
                break
            plain += 1
        assert shared(run, tokens, offset) == plain


def test_what_builds_on_others_goes_first() -> None:
    tree: Tree[Run, Mark] = Tree()
    tree.insert("", [1, 2, 3], lambda a, b: _state([1, 2, 3], a, b), 0.0)
    tree.insert("", [1, 2, 3, 4, 5], lambda a, b: _state([1, 2, 3, 4, 5], a, b), 0.0)
    order = [n.end for n, _ in victims(tree.nodes.values(), 1.0, 10_000)]
    assert order == [5, 3]


def test_pinned_state_stays() -> None:
    tree: Tree[Run, Mark] = Tree()
    node = tree.insert("", [1, 2], lambda a, b: _state([1, 2], a, b), 0.0)
    node.pins = 1
    assert list(victims(tree.nodes.values(), 1.0, 10_000)) == []


@given(st.integers(1, 10**6), st.integers(1, 10**9), st.floats(0, 1e6), st.floats(0, 1e6))
def test_worth_falls_with_age_and_size(tokens: int, size: int, age: float, more: float) -> None:
    assert worth(tokens, size, age + more) <= worth(tokens, size, age)
    assert worth(tokens, size + 1, age) <= worth(tokens, size, age)
    assert worth(tokens + 1, size, age) >= worth(tokens, size, age)
