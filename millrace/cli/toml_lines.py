"""Where a key of a TOML file stands, for messages: Python's parser does not say.

A scan of headers and assignments, line by line. A text over several lines may hold what looks like either:
the number is for people, and nothing depends on it.
"""

from __future__ import annotations

import re
import tomllib
from typing import Any

_HEADER = re.compile(r"\s*\[([^\[\]]+)\]\s*(?:#.*)?")
_NAME = r"(?:[A-Za-z0-9_-]+|\"[^\"]*\"|'[^']*')"
_ASSIGNED = re.compile(rf"\s*({_NAME}(?:\s*\.\s*{_NAME})*)\s*=")


class TomlLines:
    def __init__(self, text: str) -> None:
        self._lines: dict[tuple[str, ...], int] = {}
        table: tuple[str, ...] = ()
        for number, line in enumerate(text.splitlines(), 1):
            if header := _HEADER.fullmatch(line):
                table = _path(header[1])
                self._lines.setdefault(table, number)
            elif assigned := _ASSIGNED.match(line):
                self._lines.setdefault((*table, *_path(assigned[1])), number)

    def of(self, *path: str) -> int | None:
        """The line of a table or key; of the nearest table around it where it is not found itself."""
        for length in range(len(path), 0, -1):
            if (found := self._lines.get(path[:length])) is not None:
                return found
        return None

    def has(self, *path: str) -> bool:
        return path in self._lines

    def place(self, *path: str) -> str:
        """`, line N`, or nothing where it is not known."""
        found = self.of(*path)
        return "" if found is None else f", line {found}"


def _path(text: str) -> tuple[str, ...]:
    """The parts of a dotted name."""
    try:
        node: Any = tomllib.loads(f"{text} = 0")
    except tomllib.TOMLDecodeError:
        return ()
    parts = []
    while isinstance(node, dict):
        ((name, node),) = node.items()
        parts.append(name)
    return tuple(parts)
