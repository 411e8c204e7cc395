"""Disk space of stored responses: the limit, each caller's share of it, and what is kept free.

With keys, each of them may store an equal part of the limit, so that no key takes another's room. A small
reserve file is kept beside the store: deleting writes to SQLite's log before it frees anything, and on a
full disk the log takes the reserve's place.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
from dataclasses import dataclass
from pathlib import Path

from millrace.errors import InsufficientStorage
from millrace.sizes import format_bytes

_MOST = 16 << 30
_KEEP_FREE = 64 << 20
_RESERVE = 4 << 20
_ZEROS = bytes(1 << 20)


@dataclass(frozen=True)
class StoreUsage:
    """Bytes that a caller has stored, and that all callers have."""

    own: int = 0
    total: int = 0


class StoreSpace:
    def __init__(self, path: Path, limit: int | None = None, keys: int = 0) -> None:
        """`limit` is in bytes; None takes half of the disk's free space, and 16 GiB at most."""
        self._path = path
        self._file = path.with_name(path.name + "-reserve")
        disk = shutil.disk_usage(path.parent)
        held = path.stat().st_size if path.exists() else 0
        self.limit = min(_MOST, (disk.free + held) // 2) if limit is None else limit
        self._keys = max(1, keys)
        self.share = self.limit // self._keys
        self._keep_free = min(_KEEP_FREE, disk.total // 20)
        self.reserve = min(_RESERVE, disk.total // 20)

    def check(self, usage: StoreUsage) -> None:
        """Raise if this is more than a caller, or all of them, may store."""
        if usage.own > self.share:
            divided = f" divided by {self._keys} keys" if self._keys > 1 else ""
            raise InsufficientStorage(
                f"There is no room to store this: with it, your stored responses and conversations "
                f"would take {format_bytes(usage.own)}, and the limit is {format_bytes(self.share)} "
                f"(--store-limit {format_bytes(self.limit)}{divided}). Delete some of them, or send "
                "store: false."
            )
        if usage.total > self.limit:
            raise InsufficientStorage(
                f"There is no room to store this: with it, all stored responses and conversations "
                f"would take {format_bytes(usage.total)}, and the limit is {format_bytes(self.limit)} "
                "(--store-limit). Send store: false, or ask the operator for more room."
            )

    def check_disk(self, wanted: int) -> None:
        """Raise if the disk would have too little free space with `wanted` more bytes."""
        free = shutil.disk_usage(self._path.parent).free
        if free < wanted + self._keep_free:
            raise InsufficientStorage(
                f"There is no room to store this: the disk of the response store has {format_bytes(free)} "
                f"free, and {format_bytes(self._keep_free)} of it are kept free. Send store: false, or "
                "delete stored responses."
            )

    def release(self) -> None:
        """Give the reserve file's space back to the disk."""
        with contextlib.suppress(OSError):
            self._file.unlink(missing_ok=True)

    def restore(self) -> None:
        """Write the reserve file, unless it is there or the disk is too full for it."""
        with contextlib.suppress(OSError):
            if self._file.exists() and self._file.stat().st_size >= self.reserve:
                return
        try:
            # Written, not only extended: a sparse file takes no space.
            with os.fdopen(os.open(self._file, os.O_CREAT | os.O_WRONLY, 0o600), "wb") as file:
                for start in range(0, self.reserve, len(_ZEROS)):
                    file.write(_ZEROS[: self.reserve - start])
        except OSError:
            self.release()


def is_full(error: sqlite3.Error) -> bool:
    """Whether SQLite failed because its disk is full."""
    return getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
