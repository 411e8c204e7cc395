"""Making a conversation fit: the oldest items go first, what instructs the model never does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from millrace.api.responses.items import Item

T = TypeVar("T")
_OUTPUTS = ("function_call_output", "custom_tool_call_output")
_RULES = ("system", "developer")


def is_rule(item: Item) -> bool:
    """Whether an item instructs the model, so that it stays when others are dropped."""
    return item.get("role") in _RULES


def reserve(window: int, wanted: int | None) -> int:
    """Tokens that a shortened prompt leaves for the answer."""
    return min(wanted or window // 8, window // 2)


def shortest_cut(
    items: Sequence[Item], build: Callable[[Sequence[Item]], T], fits: Callable[[T], bool]
) -> T | None:
    """What is built from the items once enough of the oldest are gone; None if nothing helps.

    A conversation that still begins with its user is tried first: templates expect that.
    """
    places = cuts(items)
    for users_only in (True, False):
        cut = [at for at in places if not users_only or items[at].get("role") == "user"]
        built = _first_that_fits(cut, lambda at: build(without(items, at)), fits)
        if built is not None:
            return built
    return None


def cuts(items: Sequence[Item]) -> list[int]:
    """Where a shortened conversation may begin: not with a result, whose call would be gone."""
    return [
        at
        for at, item in enumerate(items)
        if at and item["type"] not in _OUTPUTS and not is_rule(item)
    ]


def without(items: Sequence[Item], at: int) -> list[Item]:
    """The items from a place on, with the instructions from before it, and no lonely results."""
    kept = [i for i in items[:at] if is_rule(i)]
    called: set[str] = set()
    for item in items[at:]:
        if item["type"] in _OUTPUTS:
            if item["call_id"] not in called:
                continue
        elif "call_id" in item:
            called.add(item["call_id"])
        kept.append(item)
    return kept


def _first_that_fits(
    cut: Sequence[int], build: Callable[[int], T], fits: Callable[[T], bool]
) -> T | None:
    """Longer cuts make shorter prompts, so the shortest cut that fits is found by halving."""
    low, high, best = 0, len(cut), None
    while low < high:
        middle = (low + high) // 2
        built = build(cut[middle])
        if fits(built):
            best, high = built, middle
        else:
            low = middle + 1
    return best
