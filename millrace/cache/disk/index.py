"""The index on disk: one SQLite file with a row per node.

A row is written after the files it names, in one transaction with its relatives. After a crash
rows may be missing; a row that is there tells the truth, or its checksum or that of its file fails.
An index that cannot be trusted is set aside, and a new one begun.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sqlite3
import zlib
from array import array
from pathlib import Path
from typing import Any

from millrace.cache.disk.files import remove
from millrace.cache.disk.fingerprint import FORMAT
from millrace.cache.disk.records import Changes, FileRef, IndexRow

NAME = "index.sqlite"
ASIDE = f"{NAME}-damaged"
"""What an index that could not be used is kept as, for whoever wants to know why."""
BASE = 256 << 10
"""More than an empty index takes, its making included."""

_PAGE = 4096
_FRAME = 24
_FIXED = 16 * (2 * _PAGE + _FRAME)
_LARGEST_LOG = 1 << 20
_TRIES = 8
_UNUSABLE = (sqlite3.Error, ValueError, TypeError, OverflowError)
"""What a damaged index makes SQLite and its reader raise; ValueError is for text that is none."""
_ENVIRONMENT = ("READONLY", "CANTOPEN", "FULL", "PERM", "BUSY", "LOCKED")
# Tokens have a table of their own: times of use change often, and a changed row is written whole.
_SCHEMA = (
    "CREATE TABLE about (fingerprint TEXT NOT NULL)",
    "CREATE TABLE runs (node INTEGER PRIMARY KEY, tokens BLOB NOT NULL)",
    """
    CREATE TABLE nodes (
      node INTEGER PRIMARY KEY, parent INTEGER NOT NULL, salt TEXT NOT NULL, used REAL NOT NULL,
      segment INTEGER, size INTEGER, crc INTEGER, length INTEGER, lo INTEGER, hi INTEGER,
      checkpoint INTEGER, checkpoint_size INTEGER, checkpoint_crc INTEGER, proof INTEGER NOT NULL
    )
    """,
)
_ROWS = """
SELECT node, parent, salt, used, segment, size, crc, length, lo, hi, checkpoint, checkpoint_size,
       checkpoint_crc, proof, tokens
FROM nodes JOIN runs USING (node)
"""


class Index:
    def __init__(self, folder: Path, fingerprint: str, budget: int, *, sync: bool) -> None:
        self._path = folder / NAME
        self._log = folder / f"{NAME}-wal"
        self._aside = folder / ASIDE
        self._fingerprint = fingerprint
        self._sync = sync
        self._largest_log = min(_LARGEST_LOG, budget // 32)
        self._largest_aside = budget // 32
        self.remade = False
        """What was there could not be used."""
        self.bytes = 0
        """What it takes on disk, or will take once its log is merged."""
        self._pages = 0
        try:
            self._db = self._open()
        except _UNUSABLE as error:
            if not self._path.exists() or (_environment(error) and not self._path.is_dir()):
                raise
            self.remake()
        self.tidy(always=True)

    def rows(self) -> list[IndexRow]:
        try:
            return [_row(*values) for values in self._db.execute(_ROWS)]
        except _UNUSABLE:
            self.remake()
            return []

    def cost(self, changes: Changes) -> int:
        """More bytes than writing these changes adds."""
        fixed = _FIXED + (BASE if changes.wipe else 0)
        rows = sum(self.cost_of_row(row) for row in changes.rows)
        return fixed + rows + self.cost_of_gone(len(changes.gone) + len(changes.used))

    def cost_of_row(self, row: IndexRow) -> int:
        pages = 5 + 2 * (len(row.tokens) * 8 + len(row.salt.encode())) // _PAGE
        # Each page once in the log, and once in the file when it is new.
        return pages * (2 * _PAGE + _FRAME)

    def cost_of_gone(self, count: int) -> int:
        return min(2 * count, self._pages) * (_PAGE + _FRAME)

    def write(self, changes: Changes) -> None:
        db = self._db
        db.execute("BEGIN IMMEDIATE")
        try:
            if changes.wipe:
                db.execute("DELETE FROM nodes")
                db.execute("DELETE FROM runs")
            gone = [(id,) for id in changes.gone]
            db.executemany("DELETE FROM nodes WHERE node = ?", gone)
            db.executemany("DELETE FROM runs WHERE node = ?", gone)
            db.executemany(
                f"INSERT OR REPLACE INTO nodes VALUES ({','.join('?' * 14)})",
                [_values(row) for row in changes.rows],
            )
            db.executemany(
                "INSERT OR REPLACE INTO runs VALUES (?, ?)",
                [(row.id, _packed(row.tokens)) for row in changes.rows],
            )
            db.executemany(
                "UPDATE nodes SET used = ? WHERE node = ?", [(t, i) for i, t in changes.used]
            )
            db.execute("COMMIT")
        except BaseException:
            if db.in_transaction:
                db.execute("ROLLBACK")
            raise
        finally:
            self._measure()
        if changes.wipe:
            db.execute("VACUUM")
            self.tidy(always=True)
        else:
            self.tidy()

    def tidy(self, *, always: bool = False) -> None:
        """Merge the log into the file before it grows large."""
        if always or _size(self._log) > self._largest_log:
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        self._measure()

    def remake(self) -> None:
        """Set the index aside, and start with an empty one."""
        self.remade = True
        self._db_close()
        self._set_aside()
        for path in (self._path, self._log, self._path.with_name(f"{NAME}-shm")):
            if not remove(path):
                raise PermissionError(f"{path} cannot be removed")
        self._db = self._open()
        self._measure()

    def _set_aside(self) -> None:
        """Keep what is damaged, if it is small and nothing stands in its place."""
        if self._path.is_dir():
            for number in range(_TRIES):
                with contextlib.suppress(OSError):
                    os.rename(self._path, self._aside.with_name(f"{ASIDE}-{number}"))
                    return
        elif remove(self._aside) and _size(self._path) <= self._largest_aside:
            with contextlib.suppress(OSError):
                os.rename(self._path, self._aside)

    def close(self) -> None:
        try:
            self.tidy(always=True)
        finally:
            self._db_close()

    def _open(self) -> sqlite3.Connection:
        # The folder's lock keeps other processes out; of our threads only one is here at a time.
        db = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False, timeout=2)
        try:
            db.execute("PRAGMA locking_mode = EXCLUSIVE")
            db.execute(f"PRAGMA page_size = {_PAGE}")
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA wal_autocheckpoint = 0")
            db.execute("PRAGMA temp_store = MEMORY")
            db.execute(f"PRAGMA synchronous = {'NORMAL' if self._sync else 'OFF'}")
            if db.execute("PRAGMA quick_check(1)").fetchone()[0] != "ok":
                raise sqlite3.DatabaseError("the index is damaged")
            if not db.execute("PRAGMA user_version").fetchone()[0]:
                db.execute("BEGIN IMMEDIATE")
                for statement in _SCHEMA:
                    db.execute(statement)
                db.execute("INSERT INTO about VALUES (?)", (self._fingerprint,))
                db.execute(f"PRAGMA user_version = {FORMAT}")
                db.execute("COMMIT")
            version = db.execute("PRAGMA user_version").fetchone()[0]
            about = db.execute("SELECT fingerprint FROM about").fetchall()
            if version != FORMAT or about != [(self._fingerprint,)]:
                raise sqlite3.DatabaseError("the index belongs to something else")
        except BaseException:
            db.close()
            raise
        return db

    def _db_close(self) -> None:
        db = getattr(self, "_db", None)
        if db is not None:
            db.close()

    def _measure(self) -> None:
        self._pages = int(self._db.execute("PRAGMA page_count").fetchone()[0])
        self.bytes = max(_size(self._path), self._pages * _PAGE) + _size(self._log)
        self.bytes += _size(self._aside)


def _environment(error: Exception) -> bool:
    """Whether the folder is at fault, not the index."""
    name = getattr(error, "sqlite_errorname", "")
    return name.startswith(tuple(f"SQLITE_{n}" for n in _ENVIRONMENT))


def _size(path: Path) -> int:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0


def _packed(tokens: array[int]) -> bytes:
    return tokens.tobytes()


def _values(row: IndexRow) -> tuple[Any, ...]:
    s, c = row.segment, row.checkpoint
    return (
        *(row.id, row.parent, row.salt, row.used),
        *((s.id, s.size, s.crc, s.length) if s else (None, None, None, None)),
        *(row.lo, row.hi),
        *((c.id, c.size, c.crc) if c else (None, None, None)),
        _proof(row),
    )


def _proof(row: IndexRow) -> int:
    """A checksum over all that decides what state a node has; times of use change by themselves."""
    s, c = row.segment, row.checkpoint
    files = [[f.id, f.size, f.crc, f.length] if f else None for f in (s, c)]
    text = json.dumps([row.id, row.parent, row.salt, row.lo, row.hi, files])
    return zlib.crc32(_packed(row.tokens), zlib.crc32(text.encode()))


def _row(*values: Any) -> IndexRow:
    """A row as it was written. Raises ValueError or TypeError if it is another one."""
    node, parent, salt, used, file, size, crc, length, lo, hi, check, check_size, check_crc = (
        values[:13]
    )
    proof, raw = values[13:]
    tokens = array("q")
    tokens.frombytes(raw)
    row = IndexRow(
        node,
        parent,
        salt,
        tokens,
        None if file is None else FileRef(file, size, crc, length),
        lo,
        hi,
        None if check is None else FileRef(check, check_size, check_crc, 0),
        used,
    )
    if proof != _proof(row) or not math.isfinite(used):
        raise ValueError(f"the row of node {node} is damaged")
    return row
