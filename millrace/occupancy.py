"""Who uses millrace's own folder: programs that do hold a shared lock on it for as long as they live.

So that what clears the folder knows whether it may. It knows nothing of what lies in there.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from millrace.config import home

_FILE = ".in-use"
_held: dict[Path, int] = {}


def occupy() -> None:
    """Use the folder until this process ends; where nothing can be written, nothing is said."""
    folder = home().absolute()
    if folder in _held:
        return
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / _FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        # Somebody who clears the folder has it for a moment.
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        _held[folder] = descriptor


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[bool]:
    """Whether nobody uses the folder; nobody begins to until this is over."""
    try:
        descriptor = os.open(folder / _FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:
        yield True
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)
