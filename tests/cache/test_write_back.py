"""When state goes to disk: once it was used twice or nothing else is to do, and not too fast."""

from __future__ import annotations

import copy

import pytest
from cache.plain_store import Whole
from hypothesis import given
from hypothesis import strategies as st

from millrace.cache import writeback
from millrace.cache.observations import DiskTrouble
from millrace.cache.operations import Operation, WriteDisk
from millrace.cache.writeback import IDLE_AFTER, SHARED_AFTER, SHARED_BUSY, Allowance

PLENTY = 1 << 30


def _whole(memory: int = PLENTY) -> Whole:
    return Whole("cuttable", memory, disk=PLENTY)


def _pass(whole: Whole, seconds: float, *, idle: bool, steps: int = 40) -> None:
    for _ in range(steps):
        whole.now += seconds / steps
        whole.tick(idle)
        whole.hear()


def _stored(whole: Whole) -> int:
    return sum(len(n.tokens) for n in whole.store.disk.values())


def test_what_was_used_once_is_not_written_while_there_is_work() -> None:
    whole = _whole()
    whole.keep("", list(range(500)))
    _pass(whole, 1000, idle=False)
    assert _stored(whole) == 0


def test_what_was_used_once_is_written_when_the_engine_is_idle() -> None:
    whole = _whole()
    whole.keep("", list(range(500)))
    _pass(whole, IDLE_AFTER / 2, idle=True)
    assert _stored(whole) == 0
    whole.tick(idle=False)
    _pass(whole, IDLE_AFTER / 2, idle=True)
    assert _stored(whole) == 0
    _pass(whole, IDLE_AFTER, idle=True)
    assert _stored(whole) == 500
    assert whole.tick(idle=True) is None


@pytest.mark.parametrize("idle", [False, True])
def test_what_was_restored_is_written_soon(idle: bool) -> None:
    whole = _whole()
    whole.keep("", list(range(500)))
    whole.restore("", list(range(500)))
    wait = SHARED_AFTER if idle else SHARED_BUSY
    _pass(whole, 0.9 * wait, idle=idle)
    assert _stored(whole) == 0
    _pass(whole, 0.7 * wait + 1, idle=idle)
    assert _stored(whole) == 500


def test_what_a_second_request_kept_as_well_is_written() -> None:
    whole = _whole()
    whole.keep("", list(range(500)), owner=1)
    whole.keep("", list(range(500)), owner=1)
    _pass(whole, 20, idle=False)
    assert _stored(whole) == 0
    whole.keep("", list(range(500)), owner=2)
    _pass(whole, 20, idle=False)
    assert _stored(whole) == 500


def test_of_two_prompts_that_part_the_common_head_is_written() -> None:
    whole = _whole()
    head = list(range(300))
    for i in (1, 2):
        whole.keep("", [*head, *range(1000 * i, 1000 * i + 300)])
    _pass(whole, 20, idle=False)
    assert _stored(whole) == 300


def test_what_leaves_the_memory_is_written_on_its_way_out() -> None:
    whole = _whole(108 * 1000)
    for i in range(20):
        whole.now += 1
        whole.keep("", list(range(1000 * i, 1000 * i + 100)))
        whole.hear()
    whole.check()
    assert all(
        whole.index.known("", [*range(1000 * i, 1000 * i + 100), 0]) == 100 for i in range(20)
    )


def test_writes_keep_to_a_rate() -> None:
    whole = _whole()
    whole.index._write_back._allowance = Allowance(rate=1000, burst=20_000)
    for i in range(50):
        whole.keep("", list(range(1000 * i, 1000 * i + 100)))
    _pass(whole, IDLE_AFTER + 1, idle=True)
    begun = whole.store.written
    assert 20_000 <= begun <= 40_000
    _pass(whole, 50, idle=True, steps=2000)
    assert 40_000 <= whole.store.written - begun <= 60_000
    again = whole.tick(idle=True)
    assert again is not None and again > 0


def test_writes_wait_for_those_under_way() -> None:
    whole = _whole()
    whole.keep("", list(range(500)))
    whole.keep("", list(range(1000, 1500)))
    whole.index._write_back.backlog = writeback.WRITE_AHEAD + 1
    for _ in range(20):
        whole.now += 1
        whole.tick(idle=True)
    assert _stored(whole) == 0


def test_a_disk_that_is_off_gets_nothing() -> None:
    whole = _whole()
    whole.keep("", list(range(500)))
    whole.index.observe([], DiskTrouble("full of water", off=True), 0.0)
    _pass(whole, 100, idle=True)
    whole.keep("", list(range(600)))
    _pass(whole, 100, idle=True)
    assert _stored(whole) == 0
    told = whole.index.report("r").disk
    assert told is not None and told.error == "full of water"


def test_at_the_end_what_was_used_twice_is_written_first() -> None:
    whole = _whole()
    whole.keep("", list(range(500)))
    whole.keep("", list(range(1000, 1500)))
    whole.restore("", list(range(1000, 1501)))
    out: list[Operation] = []
    whole.index.close(out, whole.now)
    writes = [o for o in out if isinstance(o, WriteDisk)]
    assert [w.tokens[0] for w in writes] == [1000, 0]
    # No more than the disk may have.
    other = Whole("cuttable", PLENTY, disk=60_000)
    for i in range(5):
        other.keep("", list(range(1000 * i, 1000 * i + 500)))
    out = []
    other.index.close(out, 0.0)
    assert len([o for o in out if isinstance(o, WriteDisk)]) == 2


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(0, 10_000)), max_size=30))
def test_an_allowance_is_never_more_than_its_rate_and_burst(spent: list[tuple[float, int]]) -> None:
    allowance, now, total = Allowance(rate=100, burst=1000), 0.0, 0
    for passed, nbytes in spent:
        now += passed
        if allowance.left(now) > 0:
            allowance.spend(nbytes, now)
            total += nbytes
        most = 1000 + 100 * now + 10_000
        assert total <= most
        later = copy.copy(allowance)
        assert later.left(now + later.wait(now)) >= -1e-6
