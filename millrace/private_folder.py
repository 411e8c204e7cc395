"""A process's own folder among the system's temporary files, and the removal of those of dead processes.

A process that is killed cannot remove its folder. The owner holds a lock on the folder itself, which the
system releases with the process: a folder that can be locked has no owner any more. Process ids would not
do, since they are used again and differ between containers that share temporary files.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import stat
import tempfile
from pathlib import Path

from millrace.errors import SetupError

log = logging.getLogger("millrace")

PREFIX = "millrun-"


class PrivateFolder:
    """Readable by its owner alone; removed at the end, or by the next process after a violent one."""

    def __init__(self) -> None:
        sweep()
        self._descriptor, self._path = _locked_folder()

    @property
    def path(self) -> Path:
        if not self._path.is_dir():  # a cleaner of temporary files may have removed it
            os.close(self._descriptor)
            self._descriptor, self._path = _locked_folder()
        return self._path

    def remove(self) -> None:
        if self._descriptor >= 0:
            shutil.rmtree(self._path, ignore_errors=True)
            os.close(self._descriptor)
            self._descriptor = -1


def _locked_folder() -> tuple[int, Path]:
    while True:
        try:
            path = Path(tempfile.mkdtemp(prefix=PREFIX))
        except OSError as error:
            raise SetupError(
                f"No temporary folder can be created: {error.strerror or error}. Free space there, or set "
                "TMPDIR to a folder that can be written."
            ) from error
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:
            # Where folders cannot be locked, none can be found to be without an owner.
            log.debug("%s cannot be locked: %s", path, error)
            return descriptor, path
        # Another process may have removed it before it was locked.
        with contextlib.suppress(OSError):
            if os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(descriptor)):
                return descriptor, path
        os.close(descriptor)


def sweep() -> int:
    """Remove the folders of this user's processes that ended without removing them; returns how many."""
    removed, place = 0, "the folder of temporary files"
    try:
        place = tempfile.gettempdir()
        names = [name for name in os.listdir(place) if name.startswith(PREFIX)]
        parent = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        log.debug("%s cannot be looked through: %s", place, error)
        return 0
    try:
        for name in names:
            with contextlib.suppress(OSError):
                removed += _swept(name, parent)
    finally:
        os.close(parent)
    if removed:
        log.info("removed %d temporary folders of processes that were killed", removed)
    return removed


def _swept(name: str, parent: int) -> bool:
    """Whether a folder had no owner and is removed; raises OSError where it is not to be had."""
    # No link is followed: one could lead to a folder that is none of ours.
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
    descriptor = os.open(name, flags, dir_fd=parent)
    try:
        about = os.fstat(descriptor)
        if about.st_uid != os.geteuid() or stat.S_IMODE(about.st_mode) & 0o077:
            return False
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(name, dir_fd=parent)
        return True
    finally:
        os.close(descriptor)
