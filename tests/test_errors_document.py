"""docs/errors.md is what millrace/errors.py has; `MILLRACE_WRITE_DOCS=1` writes it anew."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from pathlib import Path

from millrace import errors
from millrace.errors import MillraceError

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "errors.md"
HEAD = """# Errors

Every error has a code, a status and a sentence that names the remedy. The code stands where the
protocol has a place for it: `error.code` (OpenAI, Responses), `error.type` in the protocol's own words
(Anthropic), `error` as a sentence (Ollama), the status and its message (gRPC). A stream that has begun
ends with an error event of the same contents. `tests/test_errors_document.py` writes this page from the
source.

| code | status | |
|---|---|---|
"""


def document() -> str:
    rows: dict[tuple[int, str], list[str]] = {}
    for kind in [MillraceError, *_kinds(MillraceError)]:
        if kind is errors.SetupError:
            continue  # ends the command, and is no answer
        rows.setdefault((kind.status, kind.code), []).append(_about(kind))
    return HEAD + "".join(
        f"| `{code}` | {status} | {' '.join(texts)} |\n"
        for (status, code), texts in sorted(rows.items())
    )


def _kinds(kind: type[MillraceError]) -> Iterator[type[MillraceError]]:
    for each in kind.__subclasses__():
        if each.__module__ == errors.__name__:
            yield each
            yield from _kinds(each)


def _about(kind: type[MillraceError]) -> str:
    assert kind.__doc__ and kind.__dict__.get("__doc__"), f"{kind.__name__} says nothing of itself"
    if kind is MillraceError:
        return "A fault of the server; the log has it."
    return " ".join(inspect.cleandoc(kind.__doc__).split())


def test_the_document_lists_every_code() -> None:
    written = document()
    if os.environ.get("MILLRACE_WRITE_DOCS"):
        DOCUMENT.write_text(written, encoding="utf-8")
    assert DOCUMENT.read_text(encoding="utf-8") == written
