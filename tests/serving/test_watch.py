"""A watch sees the frozen and the stuck, in simulated time, and blames nobody for its own sleep."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from conftest import until

from millrace.flight import LOAD_PATIENCE, MOST_NAMED, FlightReading, Recording, SharedRecorder
from millrace.serving.watch import Pulse, Watch, processor_time

BUSY = FlightReading(beats=1, progress=1, patience=2.0)


class Engine:
    """What a recorder would show, second by second."""

    def __init__(self, computes: float | None = None) -> None:
        self.now, self.beats, self.progress, self.computed = 100.0, 1, 1, 0.0
        self.patience: float | None = 2.0
        self.watch = Watch((lambda: self.computed) if computes is not None else lambda: None)
        self._computes = computes or 0.0
        self.look(0)

    def look(self, seconds: float) -> Pulse:
        self.now += seconds
        self.computed += seconds * self._computes
        reading = FlightReading(self.beats, self.progress, self.patience)
        return self.watch.look(self.now, reading)

    def until(self, pulse: Pulse, beating: bool, moving: bool, limit: int = 1000) -> int:
        for second in range(1, limit):
            self.beats += 2 * beating
            self.progress += moving
            if self.look(1.0) is pulse:
                return second
        raise AssertionError("it was not noticed")


def test_a_frozen_engine_is_noticed_in_time() -> None:
    engine = Engine()
    assert engine.until(Pulse.QUIET, beating=False, moving=False) <= 5
    assert engine.until(Pulse.FROZEN, beating=False, moving=False) <= 10


def test_a_stuck_engine_is_noticed_after_its_patience() -> None:
    engine = Engine()
    assert 10 <= engine.until(Pulse.STUCK, beating=True, moving=False) <= 13
    engine = Engine()
    engine.patience = 60.0
    assert 60 <= engine.until(Pulse.STUCK, beating=True, moving=False) <= 63


@pytest.mark.parametrize("patience", [None, 2.0])
def test_an_engine_without_work_or_with_progress_is_well(patience: float | None) -> None:
    engine = Engine()
    engine.patience = patience
    with pytest.raises(AssertionError):
        engine.until(Pulse.STUCK, beating=True, moving=patience is not None)


def test_a_front_that_slept_blames_nobody() -> None:
    engine = Engine()
    for _ in range(20):
        for _ in range(7):
            assert engine.look(1.0) in (Pulse.WELL, Pulse.QUIET)
        assert engine.look(3600.0) is Pulse.WELL


def test_a_machine_that_stalls_makes_nobody_quiet() -> None:
    """Whichever of the two wakes first."""
    engine = Engine()
    for _ in range(20):
        assert engine.look(3.9) is Pulse.WELL
        engine.beats += 2
        engine.progress += 1
        assert engine.look(1.0) is Pulse.WELL


def test_a_process_that_computes_is_not_frozen() -> None:
    busy, asleep = Engine(computes=0.9), Engine(computes=0.0)
    with pytest.raises(AssertionError):
        busy.until(Pulse.FROZEN, beating=False, moving=False, limit=100)
    assert asleep.until(Pulse.FROZEN, beating=False, moving=False) <= 10


def test_a_process_that_computes_in_silence_for_minutes_is_frozen() -> None:
    assert Engine(computes=1.0).until(Pulse.FROZEN, beating=False, moving=False) <= 125


def test_a_process_gets_time_for_its_first_beat() -> None:
    engine = Engine()
    engine.beats = 0
    engine.watch = Watch()
    engine.look(0)
    assert engine.until(Pulse.FROZEN, beating=False, moving=False) > 30


def test_what_is_recorded_is_read() -> None:
    recording = Recording()
    assert recording.read() == FlightReading(patience=LOAD_PATIENCE)
    recorder = SharedRecorder(recording.file)
    recorder.working([7, 9], 2.5)
    assert recording.read() == FlightReading(progress=1, patience=2.5, requests=(7, 9))
    recorder.progress()
    recorder.working([7, 9], 2.5)
    assert recording.read().progress == 3
    recorder.working([1 << 63], 1.0)
    assert recording.read().requests == (1 << 63,)
    recorder.working(range(MOST_NAMED + 1), 1.0)
    assert recording.read().requests == ()
    recorder.working(list(range(MOST_NAMED)), 1.0)
    assert recording.read().requests == tuple(range(MOST_NAMED))
    recorder.idle()
    assert recording.read() == FlightReading(progress=6, patience=None)
    recording.close()
    recording.close()


def test_the_heart_beats_by_itself() -> None:
    recording = Recording()
    SharedRecorder(recording.file).beat()
    pause = threading.Event()
    while recording.read().beats < 2:
        pause.wait(0.05)


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="nobody counts waiting here")
def test_waiting_for_a_core_counts_and_being_stopped_does_not() -> None:
    core = min(os.sched_getaffinity(0))
    code = f"import os; os.sched_setaffinity(0, [{core}]); print(flush=True)\nwhile True: pass"
    busy = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) for _ in range(2)
    ]
    try:
        for process in busy:
            assert process.stdout is not None and process.stdout.readline()

        def wanted(process: subprocess.Popen[bytes]) -> float:
            return processor_time(process.pid) or 0.0

        # Both want one core for the whole time, and get about half of it.
        def both_count() -> bool:
            begin, before = time.monotonic(), sum(map(wanted, busy))
            time.sleep(0.4)
            return sum(map(wanted, busy)) - before > 1.3 * (time.monotonic() - begin)

        def the_first_rests() -> bool:
            before = wanted(busy[0])
            time.sleep(0.2)
            return wanted(busy[0]) - before < 0.02

        assert until(both_count)
        assert until(lambda: not the_first_rests())
        os.kill(busy[0].pid, signal.SIGSTOP)
        assert until(the_first_rests)
    finally:
        for process in busy:
            process.kill()
            process.wait()
