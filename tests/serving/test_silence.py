"""A rank's silence is what was listened to: whoever slept itself has not heard anything of it."""

from __future__ import annotations

from millrace.distributed.messages import BEAT_SECONDS, SILENT_SECONDS
from millrace.serving.ranks.silence import Silence


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_silence_is_noticed_in_time() -> None:
    clock = Clock()
    silence = Silence(clock)
    begin = clock.now
    while silence.look() <= SILENT_SECONDS:
        clock.now += BEAT_SECONDS
    assert SILENT_SECONDS < clock.now - begin <= SILENT_SECONDS + BEAT_SECONDS


def test_a_machine_that_stalls_makes_nobody_silent() -> None:
    clock = Clock()
    silence = Silence(clock)
    for stalled in (4.0, 30.0, 3600.0):
        clock.now += stalled
        assert silence.look() < SILENT_SECONDS
        silence.broken()
        assert silence.look() == 0
