"""The disk tier against a plain dictionary, over any order of calls and restarts."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from cache.disk_bench import MIB, Watch, check, part, same, segment, settled, state, tier
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from millrace.cache.disk import Dropped, Trouble
from millrace.cache.disk import writer as disk_writer
from millrace.cache.payload import Payload


@dataclass
class Known:
    parent: int
    salt: str
    tokens: list[int]
    segment: Payload | None
    checkpoint: Payload | None


@pytest.fixture(autouse=True, scope="module")
def small_files_are_cut() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk_writer, "WORTH_CUTTING", 1)
        yield


class DiskAgainstDictionary(RuleBasedStateMachine):
    @initialize()
    def open(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="millrace-disk-"))
        self.known: dict[int, Known] = {}
        self.next = 1
        self._start()

    def _start(self) -> None:
        self.disk = tier(self.folder, 64 * MIB, sync=False)
        self.watch = Watch(self.disk)

    def teardown(self) -> None:
        if hasattr(self, "disk"):
            self.disk.close(5)
            shutil.rmtree(self.folder)

    def _id(self) -> int:
        self.next += 1
        return self.next

    def _pick(self, data: st.DataObject) -> int | None:
        return data.draw(st.sampled_from(sorted(self.known))) if self.known else None

    @rule(
        data=st.data(),
        length=st.integers(1, 6),
        has_segment=st.booleans(),
        has_state=st.booleans(),
        salt=st.sampled_from(["", "s"]),
        root=st.booleans(),
    )
    def put(
        self,
        data: st.DataObject,
        length: int,
        has_segment: bool,
        has_state: bool,
        salt: str,
        root: bool,
    ) -> None:
        above = None if root else self._pick(data)
        parent = above or 0
        salt = self.known[above].salt if above else salt
        id = self._id()
        tokens = list(range(id, id + length))
        known = Known(
            parent,
            salt,
            tokens,
            segment(id, length) if has_segment else None,
            state(id) if has_state else None,
        )
        self.disk.put(id, parent, salt, tokens, known.segment, known.checkpoint)
        self.known[id] = known

    @rule(data=st.data())
    def put_checkpoint(self, data: st.DataObject) -> None:
        id = self._pick(data)
        if id is not None:
            self.disk.put_checkpoint(id, state(id))
            known = self.known[id]
            known.checkpoint = known.checkpoint or state(id)

    @rule(data=st.data())
    def split(self, data: st.DataObject) -> None:
        splittable = [id for id, k in self.known.items() if len(k.tokens) > 1]
        if not splittable:
            return
        id = data.draw(st.sampled_from(splittable))
        known = self.known[id]
        length = len(known.tokens)
        at = data.draw(st.integers(1, length - 1))
        upper = self._id()
        self.disk.split(id, at, upper)
        whole = known.segment
        first = part(whole, 0, at) if whole else None
        self.known[upper] = Known(known.parent, known.salt, known.tokens[:at], first, None)
        known.parent, known.tokens = upper, known.tokens[at:]
        known.segment = part(whole, at, length) if whole else None

    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        id = self._pick(data)
        if id is None:
            return
        self.disk.forget([id])
        gone = {id}
        while more := {i for i, k in self.known.items() if k.parent in gone} - gone:
            gone |= more
        for each in gone:
            del self.known[each]

    @rule()
    def clear(self) -> None:
        self.disk.clear()
        self.known.clear()

    @rule()
    def restart(self) -> None:
        self.disk.close(10)
        self._start()
        self.everything_is_listed()

    @rule()
    def everything_is_listed(self) -> None:
        check(settled(self.disk), self.folder)
        listed = {n.id: n for n in self.disk.nodes()}
        assert listed.keys() == self.known.keys()
        for id, known in self.known.items():
            node = listed[id]
            assert (node.parent, node.salt, node.tokens) == (known.parent, known.salt, known.tokens)
            assert (node.file is None) == (known.segment is None)
            assert (node.checkpoint is None) == (known.checkpoint is None)

    @rule()
    def everything_reads(self) -> None:
        wants = [
            (id, k.segment is not None, k.checkpoint is not None) for id, k in self.known.items()
        ]
        loaded = self.watch.read(*wants)
        assert not loaded.failed
        for id, known in self.known.items():
            assert loaded.payloads is not None
            assert same(loaded.payloads[id][0], known.segment)
            assert same(loaded.payloads[id][1], known.checkpoint)

    @invariant()
    def nothing_is_lost(self) -> None:
        if hasattr(self, "disk"):
            assert not self.watch.of(Trouble)
            lost = {id for e in self.watch.of(Dropped) for id in e.nodes}
            assert not lost & self.known.keys()


TestDiskAgainstDictionary = DiskAgainstDictionary.TestCase
TestDiskAgainstDictionary.settings = settings(
    max_examples=600,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
