"""A thread that yields is nicer than the rest of its process, which stays as it was."""

from __future__ import annotations

import os
import sys
import threading

import pytest

from millrace import thread_priority


def _priority(thread: int) -> int:
    return os.getpriority(os.PRIO_PROCESS, thread)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts threads one by one")
def test_only_the_calling_thread_yields() -> None:
    before = _priority(threading.get_native_id())
    seen: list[int] = []

    def work() -> None:
        thread_priority.yield_to_others()
        seen.append(_priority(threading.get_native_id()))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [min(19, before + 10)]
    assert _priority(threading.get_native_id()) == before


def test_nothing_is_asked_of_other_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.delattr(os, "setpriority")
    thread_priority.yield_to_others()
