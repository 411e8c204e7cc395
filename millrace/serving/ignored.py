"""What was left out of a request, as a header can say it."""

from __future__ import annotations

from collections.abc import Iterable

HEADER = "x-millrace-ignored"
_LONGEST = 2000
"""Characters."""


def in_a_header(names: Iterable[str]) -> str:
    """The names, which may be the client's own: one plain line without blanks at its ends."""
    found: list[str] = []
    length = 0
    for name in dict.fromkeys(names):
        found.append(_plain(name))
        length += len(found[-1]) + 2
        if length > _LONGEST + 2:
            break  # the rest would be cut
    text = ", ".join(found)
    return text if len(text) <= _LONGEST else text[:_LONGEST] + "..."


def _plain(name: str) -> str:
    """As it is, where it can be told from its neighbours; else in quotes."""
    text = name.encode("unicode_escape").decode("ascii")
    return text if text and text == text.strip() else f'"{text}"'
