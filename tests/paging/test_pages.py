"""Pages and tables: nothing is written while two hold it, nothing is lost, nothing is freed twice."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from millrace.paging.pool import TRASH, OutOfPages, PagePool
from millrace.paging.table import PageCopy, PageTable

PAGE = 4


def test_a_pool_grows_and_shrinks_around_what_is_used() -> None:
    pool = PagePool(4)
    taken = pool.take(3)
    assert sorted(taken) == [1, 2, 3] and pool.free == 0
    with pytest.raises(OutOfPages):
        pool.take(1)
    pool.grow(8)
    assert pool.free == 4 and len(pool) == 8
    pool.release([2, 3])
    assert pool.shrink() == 2
    pool.check()


def test_pages_are_not_freed_twice() -> None:
    pool = PagePool(4)
    (page,) = pool.take(1)
    pool.share([page])
    pool.release([page])
    pool.release([page])
    with pytest.raises(ValueError):
        pool.release([page])
    with pytest.raises(ValueError):
        pool.share([page])
    with pytest.raises(ValueError):
        pool.release([TRASH])


def test_a_fork_copies_only_a_partly_filled_page() -> None:
    pool = PagePool(16)
    table = PageTable(pool, PAGE)
    table.extend(2 * PAGE)
    other, copy = table.fork()
    assert copy is None and other.pages == table.pages
    table.extend(3)
    third, copy = table.fork()
    assert copy == PageCopy(table.pages[2], third.pages[2], 3)
    assert third.pages[:2] == table.pages[:2]


def test_a_table_that_gets_no_page_stays_as_it_is() -> None:
    pool = PagePool(3)
    table = PageTable(pool, PAGE)
    table.extend(PAGE)
    with pytest.raises(OutOfPages):
        table.extend(2 * PAGE)
    assert (table.length, len(table.pages), pool.free) == (PAGE, 1, 1)


def test_pages_behind_a_window_are_given_up() -> None:
    pool = PagePool(16)
    table = PageTable(pool, PAGE, window=6)
    for _ in range(30):
        table.extend(1)
        table.pass_window()
        # The next token sees the last five keys and itself.
        seen = range(max(0, table.length - 5), table.length)
        assert all(table.pages[i // PAGE] != TRASH for i in seen)
        assert len(table.own) <= 3
    table.release()
    assert pool.used == 0


class Memory:
    """What a device would hold: the writer and place of each token of each page."""

    def __init__(self) -> None:
        self.cells: dict[tuple[int, int], object] = {}

    def write(self, table: PageTable, at: int, value: object) -> None:
        self.cells[table.pages[at // PAGE], at % PAGE] = value

    def read(self, table: PageTable, at: int) -> object:
        return self.cells[table.pages[at // PAGE], at % PAGE]

    def copy(self, copy: PageCopy | None) -> None:
        if copy is not None:
            for place in range(copy.tokens):
                self.cells[copy.target, place] = self.cells[copy.source, place]


class Sharing(RuleBasedStateMachine):
    """Sequences that grow, fork, are cut and end, beside what each of them should hold."""

    @initialize(window=st.sampled_from([None, 3, 6, 9]))
    def begin(self, window: int | None) -> None:
        self.window = window
        self.pool = PagePool(24)
        self.memory = Memory()
        self.sequences: list[tuple[PageTable, list[object]]] = []
        self.written = 0

    @rule()
    def start(self) -> None:
        if len(self.sequences) < 6:
            self.sequences.append((PageTable(self.pool, PAGE, self.window), []))

    @precondition(lambda self: self.sequences)
    @rule(which=st.integers(0, 5), tokens=st.integers(1, 9))
    def grow(self, which: int, tokens: int) -> None:
        table, values = self.sequences[which % len(self.sequences)]
        begin = table.length
        try:
            table.extend(tokens)
        except OutOfPages:
            return
        for at in range(begin, begin + tokens):
            self.written += 1
            self.memory.write(table, at, self.written)
            values.append(self.written)

    @precondition(lambda self: self.sequences)
    @rule(which=st.integers(0, 5))
    def slide(self, which: int) -> None:
        self.sequences[which % len(self.sequences)][0].pass_window()

    @precondition(lambda self: self.sequences and len(self.sequences) < 6)
    @rule(which=st.integers(0, 5), part=st.floats(0, 1))
    def fork(self, which: int, part: float) -> None:
        table, values = self.sequences[which % len(self.sequences)]
        length = int(part * table.length)
        try:
            other, copy = table.fork(length)
        except (OutOfPages, ValueError):
            return
        self.memory.copy(copy)
        self.sequences.append((other, values[:length]))

    @precondition(lambda self: self.sequences)
    @rule(which=st.integers(0, 5), less=st.integers(0, 5))
    def cut(self, which: int, less: int) -> None:
        table, values = self.sequences[which % len(self.sequences)]
        if self.window is not None:
            less = 0
        length = max(0, table.length - less)
        try:
            self.memory.copy(table.cut(length))
        except OutOfPages:
            return
        del values[length:]

    @precondition(lambda self: self.sequences)
    @rule(which=st.integers(0, 5))
    def adopt(self, which: int) -> None:
        table, values = self.sequences[which % len(self.sequences)]
        other = PageTable(self.pool, PAGE, self.window)
        try:
            self.memory.copy(other.adopt(table.pages, table.length))
        except OutOfPages:
            return
        self.sequences.append((other, list(values)))

    @precondition(lambda self: self.sequences)
    @rule(which=st.integers(0, 5))
    def end(self, which: int) -> None:
        table, _ = self.sequences.pop(which % len(self.sequences))
        table.release()

    @invariant()
    def all_is_there(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check()
        held = {page for table, _ in self.sequences for page in table.own}
        assert self.pool.used == len(held)
        for table, values in self.sequences:
            seen = table.length if self.window is None else min(table.length, self.window - 1)
            for at in range(table.length - seen, table.length):
                assert self.memory.read(table, at) == values[at]


Sharing.TestCase.settings = settings(max_examples=200, stateful_step_count=60, deadline=None)
TestSharing = Sharing.TestCase


@given(st.lists(st.integers(1, 40), max_size=30))
def test_tables_take_no_more_pages_than_their_tokens_need(lengths: list[int]) -> None:
    pool = PagePool(1 + sum(-(-n // PAGE) for n in lengths))
    tables = []
    for length in lengths:
        table = PageTable(pool, PAGE)
        table.extend(length)
        tables.append(table)
    assert pool.free == 0
    for table in tables:
        table.release()
    assert pool.used == 0
