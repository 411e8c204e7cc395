"""Logging: one line per event, as text for people or as JSON for machines, fields included.

A record's `extra={"fields": {…}}` is what it is about: the request's id above all.
"""

from __future__ import annotations

import json
import logging
import time
from typing import Any

from millrace.config import LogFormat


def setup(level: str, form: LogFormat) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(_Json() if form == "json" else _Text())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for noisy in ("httpx", "httpcore", "filelock"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def _stamp(record: logging.LogRecord) -> str:
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{whole}.{int(record.msecs):03d}Z"


def fields_of(record: logging.LogRecord) -> dict[str, Any]:
    """A record as an object, what it is about included."""
    line: dict[str, Any] = {
        "time": _stamp(record),
        "level": record.levelname.lower(),
        "logger": record.name,
        "message": record.getMessage(),
        **getattr(record, "fields", {}),
    }
    if record.exc_info:
        line["trace"] = logging.Formatter().formatException(record.exc_info)
    return line


def _one_line(value: object) -> str:
    """Words of a caller's own cannot look like further lines of the log."""
    text = str(value)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class _Text(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = getattr(record, "fields", {})
        tail = "".join(f" {k}={_one_line(v)}" for k, v in fields.items() if v is not None)
        line = f"{_stamp(record)} {record.levelname.lower()} {record.getMessage()}{tail}"
        return line + (f"\n{self.formatException(record.exc_info)}" if record.exc_info else "")


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return json.dumps(fields_of(record), ensure_ascii=False, default=str)
