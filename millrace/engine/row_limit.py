"""How many rows may run at once for the sake of streams that are used to less company. Pure.

Every row makes the step of all others longer: hardly so on a GPU, much on a CPU. A stream that has run
beside few others for a while is settled. As long as there is one, gaps are kept within what is smooth
beside steps as it knows them: rows take most of that, prompts and joins the rest. It is a courtesy and no
right: some rows there always are, whoever has waited long for one gets it (very long, where that would be
felt), and nobody waits for the sake of what is less important.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from millrace.engine.books import Job, Seat
from millrace.engine.latency_model import LatencyModel

SETTLED = 64
"""Steps after which a stream knows its company."""
FEW = 4
"""Fewer rows than these are as good as these: their steps are faster than anybody reads."""
ROWS_SHARE = 0.65
"""What of the gap a step of all rows may take."""
LEAST_ROWS, LEAST_PER_ROW = 8, 2
"""Rows there may always be: so many, and so many for each that a settled stream is used to."""
PATIENCE = 5.0
"""Seconds that somebody waits for a row before there is one more than there are."""
LONG_PATIENCE = 25.0
"""The same where steps of one more may be felt by themselves."""


class RowLimit:
    def __init__(self, most: int, latency: LatencyModel) -> None:
        """There are never more than `most`."""
        self.most = most
        self._latency = latency
        self._settled: list[Seat] = []
        self._limits: dict[int, int] = {}
        """How many there may be for now, by the priority of who asks."""
        self._lately: deque[int] = deque(maxlen=SETTLED)
        """Rows of the last steps."""
        self._granted = 0
        """Rows there may be because somebody has waited long."""
        self._eased = 0.0
        """When that was."""

    def stepped(self, running: Sequence[Seat]) -> None:
        """A step of these rows was decided."""
        self._lately.append(len(running))
        rows = max(self._lately)
        for seat in running:
            seat.steps += 1
            if seat.steps >= SETTLED:
                seat.company = min(seat.company or rows, rows)

    def look(
        self, running: Sequence[Seat], present: int, waiting: Sequence[Job], now: float
    ) -> None:
        """Say anew how many rows there may be, and how long gaps; there are so many `present`, those that
        are on their way to the others included."""
        self._settled = [s for s in running if s.company]
        self._limits = {}
        self._latency.promise(_company(self._settled) if self._settled else None)
        if not waiting or not self._settled:
            self._granted = 0
        elif now - max(self._eased, min(j.arrived for j in waiting)) >= self._patience(present):
            self._granted, self._eased = present + 1, now

    @property
    def rows(self) -> int:
        """How many there may be for the sake of all that are settled."""
        return self._for(min((s.priority for s in self._settled), default=0))

    def of(self, job: Job) -> int:
        """How many there may be with those of this prompt: it waits for the sake of those who are as
        important, and no longer when others have given way to it."""
        return self.most if job.promised else self._for(job.priority)

    def _for(self, priority: int) -> int:
        if priority not in self._limits:
            settled = [s for s in self._settled if s.priority >= priority]
            self._limits[priority] = self._limit(settled) if settled else self.most
        return self._limits[priority]

    def _patience(self, present: int) -> float:
        latency = self._latency
        if latency.doubted_step(present + 1) <= latency.promised:
            return PATIENCE
        # Where there are too many for other reasons, one more is neither here nor there.
        own = max(self._granted, LEAST_ROWS)
        anyway = present > own and latency.slow_step(present) > latency.promised
        return PATIENCE if anyway else LONG_PATIENCE

    def _limit(self, settled: Sequence[Seat]) -> int:
        company = _company(settled)
        always = min(self.most, max(LEAST_ROWS, LEAST_PER_ROW * company))
        return min(self.most, max(self._granted, self._smooth(company, always)))

    def _smooth(self, company: int, least: int) -> int:
        """The most rows whose step leaves gaps as long as they should be."""
        gap = self._latency.smooth(company)
        # To have too many is not undone before they end: what more take is seen with one more first, and
        # a fast moment is not trusted.
        few, many = least, min(self.most, max(least, self._latency.most_rows + 1))
        while few < many:
            rows = (few + many + 1) // 2
            if self._latency.slow_step(rows) <= ROWS_SHARE * gap:
                few = rows
            else:
                many = rows - 1
        return few


def _company(settled: Sequence[Seat]) -> int:
    return max(FEW, min(s.company for s in settled))
