"""The tables of stored responses: their schema, its versions, and how the file is opened.

A file of an older version is upgraded step by step when it is opened. Each step is one transaction that
also sets the version, so an upgrade that was interrupted goes on where it stopped.
"""

from __future__ import annotations

import logging
import os
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from millrace.api.responses.ids import OWNER_LENGTH
from millrace.errors import SetupError

log = logging.getLogger("millrace.api")

_BUSY = 30.0
"""Seconds to wait for another server that writes to the same file."""
_FIRST = """
CREATE TABLE responses (
    id TEXT PRIMARY KEY, created REAL NOT NULL, previous TEXT, runner INTEGER,
    body BLOB NOT NULL, events BLOB
);
CREATE TABLE conversations (
    id TEXT PRIMARY KEY, created INTEGER NOT NULL, used REAL NOT NULL, metadata BLOB NOT NULL
);
CREATE TABLE items (
    number INTEGER PRIMARY KEY, owner TEXT NOT NULL, part TEXT NOT NULL, id TEXT NOT NULL,
    body BLOB NOT NULL
);
CREATE INDEX items_of ON items (owner, number);
CREATE INDEX items_by_id ON items (id);
"""
# `turns` and `text` are what `measure.py` counts: of a conversation, and of a response with all that it
# goes back to. Rows from before have 0, which is a valid lower bound. `rule` marks items that truncation
# keeps (1) or may drop (0); for rows from before it is unknown (NULL), and they are read to find out.
# `discarded` names owners whose items are still to be deleted.
_PAGED = f"""
ALTER TABLE responses ADD COLUMN turns INTEGER NOT NULL DEFAULT 0;
ALTER TABLE responses ADD COLUMN text INTEGER NOT NULL DEFAULT 0;
ALTER TABLE conversations ADD COLUMN turns INTEGER NOT NULL DEFAULT 0;
ALTER TABLE conversations ADD COLUMN text INTEGER NOT NULL DEFAULT 0;
ALTER TABLE items ADD COLUMN rule INTEGER;
CREATE TABLE discarded (owner TEXT PRIMARY KEY);
INSERT INTO discarded SELECT DISTINCT owner FROM items WHERE owner NOT IN (SELECT id FROM responses)
    AND owner NOT IN (SELECT id FROM conversations);
DROP INDEX items_by_id;
CREATE INDEX items_by_caller ON items (id, substr(owner, -{OWNER_LENGTH}));
CREATE INDEX items_by_name ON items (owner, id);
CREATE INDEX items_output ON items (owner, number) WHERE part = 'output';
CREATE INDEX items_rules ON items (owner, number) WHERE rule IS NOT 0;
CREATE INDEX responses_by_age ON responses (created);
CREATE INDEX responses_by_previous ON responses (previous) WHERE previous IS NOT NULL;
CREATE INDEX responses_running ON responses (runner) WHERE runner IS NOT NULL;
CREATE INDEX conversations_by_use ON conversations (used);
"""
ROW_BYTES = 400
"""What a row takes beside its content: its ids, and its entries in the indexes."""


def _counting(table: str, owner: str, *contents: str) -> str:
    """Triggers that keep the bytes of a table's rows in `usage`, by the caller at the end of an id."""

    def size(row: str) -> str:
        sizes = " + ".join(f"coalesce(length({row}.{c}), 0)" for c in contents)
        return f"{sizes} + {ROW_BYTES}"

    def caller(row: str) -> str:
        return f"substr({row}.{owner}, -{OWNER_LENGTH})"

    add = (
        f"INSERT INTO usage VALUES ({caller('NEW')}, {size('NEW')}) "
        "ON CONFLICT (caller) DO UPDATE SET bytes = bytes + excluded.bytes;"
    )
    remove = f"UPDATE usage SET bytes = bytes - ({size('OLD')}) WHERE caller = {caller('OLD')};"
    return f"""
INSERT INTO usage SELECT {caller("t")}, sum({size("t")}) FROM {table} t WHERE true GROUP BY 1
    ON CONFLICT (caller) DO UPDATE SET bytes = bytes + excluded.bytes;
CREATE TRIGGER {table}_added AFTER INSERT ON {table} BEGIN {add} END;
CREATE TRIGGER {table}_removed AFTER DELETE ON {table} BEGIN {remove} END;
CREATE TRIGGER {table}_changed AFTER UPDATE OF {", ".join(contents)} ON {table}
    BEGIN {remove} {add} END;
"""


_USAGE = (
    "CREATE TABLE usage (caller TEXT PRIMARY KEY, bytes INTEGER NOT NULL);"
    + _counting("responses", "id", "body", "events")
    + _counting("conversations", "id", "metadata")
    + _counting("items", "owner", "body")
)
_STEPS = (_FIRST, _PAGED, _USAGE)
"""What makes version N + 1 of version N."""
VERSION = len(_STEPS)


def open_writer(path: Path) -> sqlite3.Connection:
    """A connection to a file of the current version, which is made or upgraded."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Other users of a shared machine must not read what people said to a model.
    os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
    sql = _connect(path)
    try:
        sql.execute("PRAGMA secure_delete = ON")
        found = _check(sql, path)
        # The file shrinks when something is deleted; this has no effect on a file that has tables.
        sql.execute("PRAGMA auto_vacuum = INCREMENTAL")
        sql.execute("PRAGMA journal_mode = WAL")
        sql.execute("PRAGMA synchronous = NORMAL")
        while _upgraded(sql, path):
            pass
        if 0 < found < VERSION:
            _make_shrinkable(sql, path)
            log.info("upgraded %s from version %d to %d", path, found, VERSION)
    except BaseException:
        sql.close()
        raise
    return sql


def _make_shrinkable(sql: sqlite3.Connection, path: Path) -> None:
    """Write a file of an earlier version anew, so that it shrinks; needs room for two copies of it."""
    if shutil.disk_usage(path.parent).free < 2 * path.stat().st_size:
        log.warning("%s does not shrink when responses are deleted: no room for a copy", path)
        return
    try:
        sql.execute("PRAGMA auto_vacuum = INCREMENTAL")
        sql.execute("VACUUM")
    except sqlite3.OperationalError as error:
        log.warning("%s does not shrink when responses are deleted: %s", path, error)


def open_reader(path: Path) -> sqlite3.Connection:
    """A connection that only reads. It sees every change that was committed before a query."""
    sql = _connect(path)
    sql.execute("PRAGMA query_only = ON")
    return sql


def _connect(path: Path) -> sqlite3.Connection:
    # Each connection is used by one thread; which one is decided after it is opened.
    return sqlite3.connect(path, timeout=_BUSY, isolation_level=None, check_same_thread=False)


def _check(sql: sqlite3.Connection, path: Path) -> int:
    (version,) = sql.execute("PRAGMA user_version").fetchone()
    if version > VERSION:
        raise SetupError(f"--store {path} was written by a newer millrace.")
    return int(version)


def _upgraded(sql: sqlite3.Connection, path: Path) -> bool:
    """Take the file one version further; False if it is at the current one."""
    # The version is read under the write lock: another server may be upgrading the same file.
    sql.execute("BEGIN IMMEDIATE")
    try:
        version = _check(sql, path)
        if version < VERSION:
            for statement in _statements(_STEPS[version]):
                sql.execute(statement)
            sql.execute(f"PRAGMA user_version = {version + 1}")
        sql.execute("COMMIT")
    except BaseException:
        roll_back(sql)
        raise
    return version < VERSION


def roll_back(sql: sqlite3.Connection) -> None:
    """End a transaction that failed. On a full disk SQLite may have ended it already, and a second
    rollback would be an error that hides the first."""
    if sql.in_transaction:
        sql.execute("ROLLBACK")


def _statements(script: str) -> Iterator[str]:
    """The statements of a script; a trigger is one of them, although it contains some."""
    found = ""
    for part in script.split(";"):
        found += part + ";"
        if sqlite3.complete_statement(found):
            yield found
            found = ""
