"""Objects as lines of JSON, safe for the ways in which clients look for the end of a line."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec

from millrace.api.errors import ollama_error
from millrace.errors import MillraceError

NDJSON = "application/x-ndjson"
BLANK = b" "
"""Keeps a silent stream alive: clients fail on an empty line, but skip blanks before an object."""

_BREAKS = {b"\xe2\x80\xa8": rb"\u2028", b"\xe2\x80\xa9": rb"\u2029", b"\xc2\x85": rb"\u0085"}
"""Characters that some clients take for the end of a line, and JSON need not write raw."""


def line(value: Any) -> bytes:
    text = msgspec.json.encode(value)
    for raw, escaped in _BREAKS.items():
        text = text.replace(raw, escaped)
    return text + b"\n"


def error_line(error: MillraceError) -> bytes:
    return line(ollama_error(error))


def now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")
