"""Lists of stored items as sections: one for a conversation, one for each response of a chain.

A list is never read as a whole: it is read in batches, each of which ends at a cursor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

Item = dict[str, Any]
Part = Literal["input", "output"]

BATCH_ITEMS = 256
"""Items that one job of the store reads or deletes at most."""
BATCH_BYTES = 1 << 20
"""Bytes after which a batch ends. A batch has at least one item, however large."""
BATCH_SECTIONS = 1024
"""Sections that one job looks at."""


@dataclass(frozen=True)
class Section:
    """The items of one response or conversation, or its input alone."""

    owner: str
    part: Part | None = None


Sections = Sequence[Section]
"""A list of items, oldest section first."""


@dataclass(frozen=True, order=True)
class Cursor:
    """A place in a list: an item's section and its number there. Cursors sort as their items do."""

    section: int
    number: int


@dataclass(frozen=True)
class ItemBatch:
    items: list[Item]
    at: Cursor | None
    """Where the next batch starts; None only if nothing was read yet."""
    more: bool
    """As many items as were wanted were found, and at least one follows."""
    ended: bool
    """No item follows."""
