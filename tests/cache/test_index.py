"""The index against plain lists: whatever it decides, what is restored is the state of those tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from cache.plain_store import SHAPES, State, Whole, states
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.cache import merging
from millrace.cache.observations import FoundOnDisk, ReadFromDisk
from millrace.cache.operations import ForgetDisk, Operation

SALTS = st.sampled_from(["", "a"])
TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=8)
MOST_TOKENS = 20
PLENTY = 1 << 30
FLOOR = 1500


@pytest.fixture(autouse=True, scope="module")
def small_nodes() -> Iterator[None]:
    """Prompts of a few tokens meet all that happens to prompts of thousands."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(merging, "LEAST", 3)
        patch.setattr(merging, "MOST", 9)
        yield


def _often(**steps: tuple[int, st.SearchStrategy[Any]]) -> st.SearchStrategy[tuple[str, Any]]:
    """One of the steps with what it needs; each as often as its number says."""
    many = [st.tuples(st.just(n), what) for n, (times, what) in steps.items() for _ in range(times)]
    return st.one_of(many)


PROMPTS = st.tuples(SALTS, st.integers(0, 30), TOKENS)
"""Most begin like an earlier one: as many of its tokens, then others."""


class Prompts:
    def __init__(self) -> None:
        self._known: list[tuple[str, list[int]]] = []

    def next(self, drawn: tuple[str, int, list[int]], keep: bool) -> tuple[str, list[int]]:
        salt, number, tokens = drawn
        if self._known and number:
            salt, before = self._known[number % len(self._known)]
            tokens = [*before[: 2 * number], *tokens][:MOST_TOKENS]
        if keep:
            self._known.append((salt, tokens))
        return salt, tokens


@given(
    st.sampled_from(sorted(SHAPES)),
    st.lists(
        _often(
            keep=(3, st.tuples(PROMPTS, st.integers(1, 14), st.booleans())),
            find=(2, PROMPTS),
        ),
        min_size=8,
        max_size=25,
    ),
)
@settings(max_examples=200, deadline=None)
def test_with_plenty_of_memory_all_that_was_kept_is_found_to_the_token(
    shape: str, steps: list[tuple[str, Any]]
) -> None:
    whole, prompts = Whole(shape, PLENTY), Prompts()
    known: set[State] = set()
    marks: set[State] = set()
    for name, what in steps:
        if name == "keep":
            salt, tokens = prompts.next(what[0], keep=True)
            _keep_in_chunks(whole, salt, tokens, what[1], what[2], known)
            if what[2]:
                marks.add((salt, tuple(tokens)))
        else:
            salt, tokens = prompts.next(what, keep=False)
            best = _best(whole, salt, tokens, known, marks)
            assert whole.index.known(salt, tokens) == best
            found = whole.restore(salt, tokens)
            assert (found.at if found else 0) == best
        whole.check()
        assert sum(len(n.tokens) for n in whole.index.nodes) == len(known)


def _keep_in_chunks(
    whole: Whole, salt: str, tokens: list[int], chunk: int, state: bool, known: set[State]
) -> None:
    new = {s for s in states(salt, tokens, 0, len(tokens)) if s not in known}
    kept = 0
    for end in [*range(chunk, len(tokens), chunk), len(tokens)]:
        last = end == len(tokens)
        kept += whole.keep(salt, tokens[:end], state=state and last, boundary=last)
    assert kept == len(new)
    known |= new


def _best(whole: Whole, salt: str, tokens: list[int], known: set[State], marks: set[State]) -> int:
    """The longest prefix that can be restored, by trying all."""
    lengths = range(1, len(tokens))
    most = max((n for n in lengths if (salt, tuple(tokens[:n])) in known), default=0)
    if not whole.needs.uncut:
        return most
    window = whole.needs.window or 0
    ahead = [m[1] for m in marks if m[0] == salt and list(m[1][:most]) == tokens[:most]]
    if most and any(len(m) < window for m in ahead):
        return most
    return max((n for n in lengths if (salt, tuple(tokens[:n])) in marks), default=0)


@given(
    st.sampled_from(sorted(SHAPES)),
    st.integers(400, 6000),
    st.lists(
        _often(
            keep=(5, st.tuples(PROMPTS, st.booleans(), st.booleans(), st.integers(0, 2))),
            find=(3, PROMPTS),
            fetch=(3, PROMPTS),
            read=(3, st.tuples(st.integers(0, 4), st.integers(0, 4))),
            tick=(3, st.tuples(st.floats(0, 20), st.booleans())),
            forget=(1, st.integers(0, 100)),
            lend=(2, st.integers(0, 4000)),
            restart=(1, st.none()),
        ),
        min_size=40,
        max_size=80,
    ),
)
@settings(max_examples=150, deadline=None)
def test_whatever_comes_and_goes_what_is_found_is_right(
    shape: str, memory: int, steps: list[tuple[str, Any]]
) -> None:
    whole, prompts = Whole(shape, memory, PLENTY), Prompts()
    tickets: list[tuple[str, list[int], int]] = []
    for name, what in steps:
        match name:
            case "keep":
                whole.now += 1
                drawn, state, boundary, owner = what
                salt, tokens = prompts.next(drawn, keep=True)
                whole.keep(salt, tokens, state=state, boundary=boundary, owner=owner)
            case "find":
                whole.restore(*prompts.next(what, keep=False))
            case "fetch":
                salt, tokens = prompts.next(what, keep=False)
                if (ticket := whole.fetch(salt, tokens)) is not None:
                    assert whole.index.waits(ticket)
                    tickets.append((salt, tokens, ticket))
            case "read":
                _read(whole, tickets, fails=not what[0], abandons=not what[1])
                tickets.clear()
            case "tick":
                whole.now += what[0]
                whole.hear()
                whole.tick(what[1])
            case "forget":
                if whole.store.disk:
                    nodes = sorted(whole.store.disk)
                    whole.store.drop(nodes[what % len(nodes)])
                    whole.hear()
            case "lend":
                whole.lend(what)
            case "restart":
                whole = _restarted(whole, shape, memory)
                tickets.clear()
        whole.check()


def test_runs_that_go_to_disk_leave_no_more_than_there_is_memory_for() -> None:
    """The tokens of a run that is written stay known: giving it up frees less than it held."""
    whole = Whole("recurrent", 400, PLENTY)
    before = [("", "000"), ("", "0"), ("", "00000"), ("", "0000100000"), ("", "100"), ("", "00")]
    before += [("", "000000"), ("a", "0"), *[("", "0")] * 7, ("", "00")]
    behind = [*[("", "0")] * 4, ("a", "000"), ("", "000010100"), ("", "0000000000"), ("", "0000")]
    for each in (before, [*behind, ("", "010000000")]):
        for salt, tokens in each:
            whole.now += 1
            boundary = tokens in ("100", "00", "0000000000", "0000", "010000000")
            state = tokens in ("0000000000", "010000000")
            whole.keep(salt, [int(t) for t in tokens], state=state, boundary=boundary)
        whole.lend(848 if each is before else 0)
        whole.check()


@pytest.mark.parametrize("shape", ["cuttable", "recurrent", "pages"])
def test_a_run_below_one_that_could_not_be_read_is_written_again(shape: str) -> None:
    """All below it leaves the disk with it: a report of that must not be taken for the new copy's."""
    whole = Whole(shape, 1 << 16, PLENTY)
    first, second = [0] * 9, [0] * 9 + [1] * 9
    whole.keep("", first)
    whole.keep("", second, owner=2)
    whole.tick(idle=True)
    whole.now += 60
    whole.tick(idle=True)
    whole.hear()
    stored = {n.id for n in whole.index.nodes if n.stored}
    assert len(stored) > 1
    top = min(
        stored, key=lambda id: len(whole.store.disk[id].tokens) + 99 * whole.store.disk[id].parent
    )
    out: list[Operation] = []
    whole.index.observe(out, ReadFromDisk(0, (), (top,)), whole.now)
    gone = [set(o.nodes) for o in out if isinstance(o, ForgetDisk)]
    assert gone == [stored]


@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_what_is_lent_is_used_and_given_back_at_once(shape: str) -> None:
    whole = Whole(shape, FLOOR)
    prompts = [[n, *range(9)] for n in range(3, 40)]
    for prompt in prompts:
        whole.now += 1
        whole.keep("", prompt)
    assert whole.index.nbytes <= FLOOR
    whole.lend(PLENTY)
    for prompt in prompts:
        whole.now += 1
        whole.keep("", prompt)
    assert whole.index.nbytes > 3000
    assert all(whole.restore("", [*prompt, 0]) for prompt in prompts)
    assert whole.index.report("x").memory.budget == FLOOR + PLENTY
    whole.lend(500)
    whole.check()
    assert 0 < whole.index.nbytes <= FLOOR + 500
    whole.lend(0)
    whole.check()
    assert 0 < whole.index.nbytes <= FLOOR


def _read(
    whole: Whole, tickets: list[tuple[str, list[int], int]], fails: bool, abandons: bool
) -> None:
    """The disk answers, and the prompts that waited for it go on."""
    for _, _, ticket in tickets if abandons else ():
        whole.index.abandon(ticket)
    whole.store.finish_reads(fails)
    whole.hear()
    for salt, tokens, ticket in tickets:
        assert not whole.index.waits(ticket)
        whole.restore(salt, tokens, ticket)
    assert not whole.index.loading


def _restarted(whole: Whole, shape: str, memory: int) -> Whole:
    """Another index that finds what this one's disk has."""
    whole.hear()
    out: list[Operation] = []
    whole.index.close(out, whole.now)
    whole.store.execute(out)
    new = Whole(shape, memory, PLENTY)
    new.store.disk = disk = whole.store.disk
    todo = [id for id, n in disk.items() if not n.parent]
    while todo:
        id = todo.pop()
        node = disk[id]
        todo += [i for i, n in disk.items() if n.parent == id]
        end = node.checkpoint is not None
        told = FoundOnDisk(id, node.parent, node.salt, tuple(node.tokens), end, 5.0)
        out = []
        new.index.observe(out, told, new.now)
        assert not out
        if not new.sizes.per_token:
            new.store.segments[id] = states(node.salt, *_line(disk, id))
    return new


def _line(disk: dict[int, Any], id: int) -> tuple[list[int], int, int]:
    """The tokens down to a node, and where its own begin and end."""
    tokens: list[int] = []
    at = id
    while at:
        tokens = disk[at].tokens + tokens
        at = disk[at].parent
    return tokens, len(tokens) - len(disk[id].tokens), len(tokens)
