"""Logging: one line per event, as text for people or as JSON for machines, fields included.

A record's `extra={"fields": {…}}` is what it is about: the request's id above all. JSON has every field in
full; text lines are at most `LINE_WIDTH` characters long.
"""

from __future__ import annotations

import json
import logging
import textwrap
import time
from typing import Any

from millrace.config import LogFormat

LINE_WIDTH = 200
_INDENT = "    "
_LONGEST_TEXT = 10_000
"""Characters of a message, or of a trace, in the text log."""
_VALUE_WIDTHS = range(160, 11, -4)
"""Characters of a field's value, tried in this order until the line fits."""
_LONGEST_ID, _ID_END = 20, 8
_SHORT_NAMES = {
    "prompt_tokens": "prompt",
    "cached_tokens": "cached",
    "generated_tokens": "generated",
    "cache_hit": "hit",
    "deaths": "resumes",
}
_USUAL = {"deaths": 0, "cached_tokens": 0, "cache_hit": "none"}
"""Values that text lines leave out."""


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


def _printable(value: object) -> str:
    """Words of a caller's own cannot look like further lines of the log."""
    text = str(value)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def short_id(id: str) -> str:
    """The end of a long id, by which it is found in the JSON log, in answers and in `/v1/requests`."""
    return id if len(id) <= _LONGEST_ID else f"…{id[-_ID_END:]}"


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _shown(fields: dict[str, Any]) -> dict[str, str]:
    """What a text line says of a record: short names, no field at its usual value, the id last."""
    found = {
        _SHORT_NAMES.get(name, name): _printable(value)
        for name, value in fields.items()
        if value is not None and not (name in _USUAL and value == _USUAL[name])
    }
    if "id" in found:
        found["id"] = short_id(found.pop("id"))
    return found


def _folded(text: str, first: str) -> list[str]:
    """The text in lines of at most `LINE_WIDTH` characters, all but the first indented."""
    lines: list[str] = []
    for part in _short(text, _LONGEST_TEXT).splitlines() or [""]:
        lines += textwrap.wrap(
            _printable(part),
            LINE_WIDTH,
            initial_indent=_INDENT if lines else first,
            subsequent_indent=_INDENT,
            break_on_hyphens=False,
        ) or [_INDENT if lines else first]
    return lines


class _Text(logging.Formatter):
    """Time, level, message, fields, and the request's id at the end.

    A message that is too long goes on in an indented line, since a warning's remedy is often its end.
    Values of fields are shortened instead: they may be a caller's own, of any length.
    """

    def format(self, record: logging.LogRecord) -> str:
        lines = _folded(record.getMessage(), f"{_stamp(record)} {record.levelname.lower()} ")
        if shown := _shown(getattr(record, "fields", {})):
            room = LINE_WIDTH - len(lines[-1])
            tails = (_tail(shown, most) for most in _VALUE_WIDTHS)
            if fitting := next((tail for tail in tails if len(tail) <= room), None):
                lines[-1] += fitting
            else:
                lines += _folded(_tail(shown, _VALUE_WIDTHS[0]).strip(), _INDENT)
        if record.exc_info:
            lines += _folded(self.formatException(record.exc_info), _INDENT)
        return "\n".join(lines)


def _tail(shown: dict[str, str], most: int) -> str:
    return "".join(f" {name}={_short(value, most)}" for name, value in shown.items())


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return json.dumps(fields_of(record), ensure_ascii=False, default=str)
