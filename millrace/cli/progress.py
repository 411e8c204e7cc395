"""What long steps show: a bar for those that report (stage, done, total), a line for models that load."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sys
import time
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


class LoadingLine:
    """A line that says over and over what is going on, where somebody looks on; gone when it ends.

    The cursor waits at its beginning: what engines log from processes of their own is written over it.
    """

    def __init__(self, say: Callable[[], str]) -> None:
        self._say = say
        self._task = asyncio.create_task(self._tell()) if sys.stderr.isatty() else None

    async def _tell(self) -> None:
        start = time.monotonic()
        while True:
            text = f"{self._say()} ({time.monotonic() - start:.0f} s)"
            _write(f"\x1b[2K{text[: shutil.get_terminal_size().columns - 1]}\r")
            await asyncio.sleep(0.2)

    def end(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._task = None
            _write("\x1b[2K")


def _write(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()
