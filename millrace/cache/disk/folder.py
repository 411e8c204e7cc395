"""The cache folder that several models share: who is there, and how many bytes each may have.

Each model has a subfolder with a lock for the process that uses it, and an account: the bytes it
may take, written down before they are taken. One lock over the whole folder makes looking at all
accounts and changing one's own a single step, so that their sum keeps to the budget also while
several engines run.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from filelock import FileLock, Timeout

from millrace.cache.disk import index
from millrace.cache.disk.events import DiskUnavailable
from millrace.cache.disk.files import SUFFIX, TEMPORARY, on_disk, remove

UNUSED = 30 * 86400.0
"""Seconds after which a model's folder is removed."""

_ACCOUNT = "account"
_LOCK = "lock"
_NAME = re.compile(r"[0-9a-f]{16}")
_FILE = re.compile(rf"([0-9]+)({re.escape(SUFFIX)}|{re.escape(TEMPORARY)})")
_PATIENCE = 10.0
_HOUR = 3600.0
_LASTING = 15.0
"""Seconds that a wish for room is told: others look at it when they next look."""


class Busy(OSError):
    """Another process has held the lock of the whole folder for too long."""


@dataclass(frozen=True)
class Other:
    """Another model's folder."""

    path: Path
    bytes: int
    wants: int
    """What it would take if it could."""
    used: float
    live: bool


class Folder:
    def __init__(
        self,
        root: Path,
        fingerprint: str,
        budget: int,
        keep_free: int,
        clock: Callable[[], float] = time.time,
        server_port: int = 0,
    ) -> None:
        self.root = root
        self.path = root / fingerprint[:16]
        self.budget = budget
        self._keep_free = keep_free
        self._clock = clock
        self._server_port = server_port
        self._wants = 0
        self._wants_until = 0.0
        self._account = (0, 0)
        self._account_until = 0.0
        self._lock = FileLock(self.path / _LOCK, timeout=0, thread_local=False)
        self._whole = FileLock(
            root / _LOCK, timeout=_PATIENCE, thread_local=False, poll_interval=0.01
        )

    def open(self) -> None:
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            with self._exclusively():
                self.path.mkdir(mode=0o700, exist_ok=True)
                try:
                    self._lock.acquire()
                except Timeout:
                    port = _account(self.path).server_port
                    raise DiskUnavailable(
                        "The prefix cache on disk belongs to "
                        + (f"the server at port {port}" if port else "another server")
                        + "; this one keeps prefixes in memory only. Give it a folder of its own with "
                        f"--cache-dir: {self.path} is in use."
                    ) from None
                self._expire()
                self._publish(self.measured())
        except Exception as error:
            self.close()
            if isinstance(error, DiskUnavailable):
                raise
            if isinstance(error, OSError | NotImplementedError):
                raise DiskUnavailable(
                    f"The prefix cache cannot be kept in {self.root}: {error}. Make the folder "
                    f"writable, or choose another one with --cache-dir."
                ) from None
            raise

    def close(self) -> None:
        self._lock.release(force=True)

    def sizes(self) -> dict[int, int]:
        """The payload files that are there."""
        found = {}
        with os.scandir(self.path) as entries:
            for entry in entries:
                match = _FILE.fullmatch(entry.name)
                if match and match[2] == SUFFIX:
                    found[int(match[1])] = entry.stat().st_size
        return found

    def sweep(self, keep: set[int]) -> None:
        """Delete payload files that nobody knows, and unfinished ones."""
        for path in list(self.path.iterdir()):
            match = _FILE.fullmatch(path.name)
            if match and (match[2] == TEMPORARY or int(match[1]) not in keep):
                remove(path)

    def file(self, id: int) -> Path:
        return self.path / f"{id}{SUFFIX}"

    def measured(self) -> int:
        return _measured(self.path)

    def lack(self, own: int, need: int) -> int:
        """Bytes that we, having `own`, must give up before we may take `need` more. At 0 they are
        ours: the account says so. Folders of models that are not in use give way first."""
        with self._exclusively():
            others = self._others()
            missing = self._missing(own, need, others)
            for other in sorted(others, key=lambda o: o.used):
                if missing <= 0:
                    break
                if not other.live and self._remove(other.path):
                    others.remove(other)
                    missing = self._missing(own, need, others)
            if missing > 0 and need and others:
                self._wants = own + need + self.budget // 16
                self._wants_until = time.monotonic() + _LASTING
            self._publish(own + need if missing <= 0 else own)
        return max(missing, 0)

    def settle(self, own: int) -> None:
        """What we have after all, no more than what was granted. Also says that it is in use."""
        with contextlib.suppress(OSError):
            self._publish(own)

    def _missing(self, own: int, need: int, others: list[Other]) -> int:
        live = [o for o in others if o.live]
        taken = sum(o.bytes for o in others)
        wanted = taken + sum(o.wants - o.bytes for o in live)
        # What others want counts until it would push us below an equal share.
        limit = max(self.budget - wanted, self.budget // (1 + len(live)))
        missing = own + need - min(limit, self.budget - taken)
        if need:
            free = shutil.disk_usage(self.path).free
            missing = max(missing, need - (free - self._keep_free))
        return missing

    def _others(self) -> list[Other]:
        found = []
        with os.scandir(self.root) as entries:
            names = [
                e.name for e in entries if _NAME.fullmatch(e.name) and e.name != self.path.name
            ]
        for name in names:
            path = self.root / name
            try:
                found.append(self._other(path))
            except OSError:
                continue
        return found

    def _other(self, path: Path) -> Other:
        size, wants, used, _ = _account(path)
        lock = FileLock(path / _LOCK, timeout=0, thread_local=False)
        try:
            lock.acquire()
        except Timeout:
            return Other(path, size, max(wants, size), used, True)
        lock.release()
        return Other(path, size, size, used, False)

    def _expire(self) -> None:
        for other in self._others():
            if not other.live and self._clock() - other.used > UNUSED:
                self._remove(other.path)

    def _remove(self, path: Path) -> bool:
        # Under the lock of the whole folder nobody can begin to use it.
        for entry in list(path.iterdir()):
            if _ours(entry.name) and not remove(entry):
                return False
        try:
            path.rmdir()
        except OSError:
            return False
        return True

    def _publish(self, own: int) -> None:
        wants = max(own, self._wants if time.monotonic() < self._wants_until else 0)
        account = (own, wants)
        if account == self._account and time.monotonic() < self._account_until:
            return
        # One short write in place: there is always a whole account to read.
        fd = os.open(self.path / _ACCOUNT, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            os.write(fd, b"%020d %020d %020d\n" % (*account, self._server_port))
        finally:
            os.close(fd)
        self._account, self._account_until = account, time.monotonic() + _HOUR

    @contextlib.contextmanager
    def _exclusively(self) -> Iterator[None]:
        try:
            self._whole.acquire()
        except Timeout:
            raise Busy(f"{self._whole.lock_file} is held by another process") from None
        try:
            yield
        finally:
            self._whole.release()


class Account(NamedTuple):
    """What a model's folder says of itself."""

    bytes: int
    wants: int
    used: float
    server_port: int


def _account(path: Path) -> Account:
    account = path / _ACCOUNT
    try:
        used = account.stat().st_mtime
        # Those that were written before servers gave their port have two numbers.
        size, wants, *port = (int(n) for n in account.read_text().split())
    except (FileNotFoundError, ValueError):
        size = _measured(path)
        return Account(size, size, path.stat().st_mtime, 0)
    return Account(size, wants, used, port[0] if port else 0)


def _ours(name: str) -> bool:
    return bool(_FILE.fullmatch(name)) or name in (_ACCOUNT, _LOCK) or name.startswith(index.NAME)


def _measured(path: Path) -> int:
    total = 0
    with os.scandir(path) as entries:
        for entry in entries:
            if _ours(entry.name):
                with contextlib.suppress(FileNotFoundError):
                    total += on_disk(entry.stat().st_size)
    return total
