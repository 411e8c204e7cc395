"""What there is to attend to in a pass: items of tokens, heads and keys that threads take."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from millrace.native import attention, library
from millrace.native.plan import Plan

_ITEMS_PER_THREAD = 6


class TokenRun(Protocol):
    """Tokens of one sequence in a pass, whoever counts them."""

    @property
    def first(self) -> int: ...

    @property
    def count(self) -> int: ...


@dataclass(frozen=True)
class NativeRun:
    """Tokens of one sequence in a pass: how many, and how many of the sequence come before them."""

    first: int
    count: int


@dataclass(frozen=True)
class Items:
    items: list[tuple[int, ...]]
    merges: list[tuple[int, ...]]
    few: bool
    """Whether every item has so few queries that small tiles suit it."""

    @classmethod
    def of(
        cls,
        plan: Plan,
        runs: Sequence[TokenRun],
        begins: Sequence[int],
        width: int,
        threads: int,
    ) -> Items:
        """`begins` are the first tokens of the runs, `width` how many blocks each has in the table."""
        group = plan.queries // plan.heads
        total = sum(run.count for run in runs)
        at_once = _tokens_at_once(group, plan.heads * total, threads)
        longest = max(run.count for run in runs)
        spread = longest * group <= attention.MOST_SPLIT and len(runs) * plan.heads < 4 * threads
        items: list[tuple[int, ...]] = []
        merges: list[tuple[int, ...]] = []
        for number, (run, begin) in enumerate(zip(runs, begins, strict=True)):
            for first in range(0, run.count, at_once):
                some = min(at_once, run.count - first)
                start, token = run.first + first, begin + first
                blocks = -(-(start + some) // attention.BLOCK)
                for head in range(plan.heads):
                    one = (number * width, head, token, some, start)
                    if spread and blocks > 1:
                        slot = len(items)
                        merges.append((*one, slot, slot + blocks, -1))
                        items += [(*one, k, k + 1, slot + k) for k in range(blocks)]
                    else:
                        items.append((*one, 0, blocks, -1))
        if not spread:
            # The longest first, so that no thread is left alone with one at the end.
            items.sort(key=lambda item: -item[6])
        return cls(items, merges, longest * group <= 4)


def _tokens_at_once(group: int, tokens: int, threads: int) -> int:
    """Tokens of an item, where there are so many for all heads: every thread is to have some items."""
    rows = library.tile_shape()[0]
    # Their queries fill whole tiles, where so many fit an item.
    step = rows // math.gcd(rows, group)
    most = attention.MOST_QUERIES // group
    wanted = min(most, -(-tokens // (_ITEMS_PER_THREAD * threads)))
    return min(most, -(-wanted // step) * step)
