"""Reading a JSONL trace: one request a line, `messages` or `prompt`, `max_tokens`, `arrival`."""

from __future__ import annotations

from pathlib import Path

import msgspec

from millrace.bench.workload import Item, WorkloadMessage
from millrace.errors import SetupError


class _Line(msgspec.Struct):
    max_tokens: int
    messages: list[WorkloadMessage] | None = None
    prompt: str | None = None
    arrival: float | None = None


def read_trace(path: Path, *, chat: bool) -> list[Item]:
    """The requests of a trace, in order of arrival where it gives arrivals."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SetupError(f"--trace {path} cannot be read: {error}.") from None
    lines = [(n, line) for n, line in enumerate(text.splitlines(), 1) if line.strip()]
    items = [_item(path, n, line, chat=chat) for n, line in lines]
    if not items:
        raise SetupError(f"--trace {path} holds no request.")
    timed = sum(item.arrival is not None for item in items)
    if timed not in (0, len(items)):
        raise SetupError(
            f"--trace {path}: {timed} of {len(items)} lines have an arrival. "
            f"Give every line one, or none."
        )
    return sorted(items, key=lambda item: item.arrival or 0.0)


def _item(path: Path, number: int, line: str, *, chat: bool) -> Item:
    where = f"--trace {path}, line {number}"
    try:
        entry = msgspec.json.decode(line, type=_Line)
    except msgspec.MsgspecError as error:
        raise SetupError(f"{where}: {error}.") from None
    if (entry.messages is None) == (entry.prompt is None):
        raise SetupError(f"{where}: give either messages or prompt.")
    if entry.max_tokens < 1:
        raise SetupError(f"{where}: max_tokens must be at least 1.")
    if entry.arrival is not None and entry.arrival < 0:
        raise SetupError(f"{where}: arrival is in seconds from the start, 0 or more.")
    if entry.messages is not None:
        if not chat:
            raise SetupError(f"{where}: messages need --endpoint chat.")
        messages = tuple(entry.messages)
    elif chat:
        messages = (WorkloadMessage("user", entry.prompt or ""),)
    else:
        return Item(prompt=entry.prompt, max_tokens=entry.max_tokens, arrival=entry.arrival)
    return Item(messages=messages, max_tokens=entry.max_tokens, arrival=entry.arrival)
