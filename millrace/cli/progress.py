"""A progress bar for long steps that report (stage, done, total)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def reporter() -> Iterator[Callable[[str, int, int | None], None]]:
    """A callable that shows progress; nothing is drawn, and rich not imported, before its first call."""
    bars: list[_Bar] = []

    def report(stage: str, done: int, total: int | None) -> None:
        if not bars:
            bars.append(_Bar())
        bars[0].update(stage, done, total)

    try:
        yield report
    finally:
        for bar in bars:
            bar.stop()


class _Bar:
    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeElapsedColumn(),
            console=Console(stderr=True),
        )
        self._tasks: dict[str, object] = {}
        self._progress.start()

    def update(self, stage: str, done: int, total: int | None) -> None:
        if stage not in self._tasks:
            self._tasks[stage] = self._progress.add_task(stage, total=total)
        self._progress.update(self._tasks[stage], completed=done, total=total)  # type: ignore[arg-type]

    def stop(self) -> None:
        self._progress.stop()
