"""Objects as lines of JSON, safe for the ways in which clients look for the end of a line."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from millrace.api.answer import one_line
from millrace.api.errors import ollama_error
from millrace.errors import MillraceError

NDJSON = "application/x-ndjson"
BLANK = b" "
"""Keeps a silent stream alive: clients fail on an empty line, but skip blanks before an object."""


def line(value: Any) -> bytes:
    return one_line(value) + b"\n"


def error_line(error: MillraceError) -> bytes:
    return line(ollama_error(error))


def now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")
