"""In what order targets are measured: rounds that alternate, each starting one target further on.

Pure. A slow minute of the machine then falls on all targets alike, and none is always first.
"""

from __future__ import annotations

# Below this many requests per client the ends of a round, where clients idle, weigh too much.
_PER_CLIENT = 2
_OPEN_LOOP = 8
_MOST = 5


def rounds_for(requests: int, clients: int | None, targets: int) -> int:
    """How many rounds a level is split into when the user does not say."""
    if targets == 1:
        return 1
    least = _OPEN_LOOP if clients is None else _PER_CLIENT * clients
    return max(1, min(_MOST, requests // least))


def turns(targets: int, rounds: int) -> list[tuple[int, int]]:
    """(round, target) in the order they run."""
    return [(r, (r + t) % targets) for r in range(rounds) for t in range(targets)]
