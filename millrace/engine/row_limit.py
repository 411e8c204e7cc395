"""How many rows may run at once for the sake of streams that are used to less company. Pure.

Every row makes the step of all others longer: hardly so on a GPU, much on a CPU. A stream that has run
beside few others for a while is settled. As long as there is one, gaps are kept within what is smooth
beside steps as it knows them: rows take most of that, prompts and joins the rest. It is a courtesy and no
right: some rows there always are, whoever has waited long for one gets it, and who is more important than
those that are settled is not held up by them.
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
PATIENCE = 10.0
"""Seconds that someone waits for a row before there may be one more."""


class RowLimit:
    def __init__(self, most: int, latency: LatencyModel) -> None:
        """There are never more than `most`."""
        self.most = most
        self.rows = most
        """How many may run for now."""
        self._priority = 0
        """How important the settled streams are."""
        self._latency = latency
        self._lately: deque[int] = deque(maxlen=SETTLED)
        """Rows of the last steps."""
        self._more = 0
        """Rows beyond the limit, for those who have waited long."""
        self._eased = 0.0
        """When the last of them was allowed."""

    def stepped(self, running: Sequence[Seat]) -> None:
        """A step of these rows was decided."""
        self._lately.append(len(running))
        rows = max(self._lately)
        for seat in running:
            if len(seat.tokens) >= SETTLED:
                seat.company = min(seat.company or rows, rows)

    def look(self, running: Sequence[Seat], waiting: Sequence[Job], now: float) -> None:
        """Say anew how many rows there may be, and how long gaps."""
        settled = [s for s in running if s.company]
        if not settled:
            self._latency.promise(None)
            self.rows, self._more = self.most, 0
            return
        company = max(FEW, min(s.company for s in settled))
        self._priority = max(s.priority for s in settled)
        self._latency.promise(company)
        if not waiting:
            self._more = 0
        elif now - max(self._eased, min(j.arrived for j in waiting)) >= PATIENCE:
            self._more, self._eased = self._more + 1, now
        least = min(self.most, max(LEAST_ROWS, LEAST_PER_ROW * company))
        self.rows = min(self.most, self._smooth(least) + self._more)

    def of(self, job: Job) -> int:
        """How many rows there may be with those of this prompt; others may have given way to it."""
        return self.most if job.promised or job.priority > self._priority else self.rows

    def _smooth(self, least: int) -> int:
        """The most rows whose step leaves gaps as long as they should be."""
        # What many rows take is seen with fewer first: to have too many is not undone before they end.
        seen = self._latency.most_rows
        few, many = least, min(self.most, max(least, seen + seen // 2))
        while few < many:
            rows = (few + many + 1) // 2
            if self._latency.step(rows) <= ROWS_SHARE * self._latency.promised:
                few = rows
            else:
                many = rows - 1
        return few
