"""Counter-based randomness: uniform numbers by (seed, token index, lane), and nothing else.

A draw does not depend on what else is in the batch, on a resume or on the rank, so a seed means
the same everywhere.
"""

from __future__ import annotations

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def _mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def derive(seed: int, stream: int) -> int:
    """An independent seed for stream number `stream` (choice k of n, say) of a seed."""
    return _mix((_mix((seed + _GOLDEN) & _MASK) + stream * _GOLDEN) & _MASK)


def uniform(seed: int, index: int, lane: int = 0) -> float:
    """A number in [0, 1) with 24 bits, so that float32 holds it exactly and never rounds to 1."""
    x = _mix((seed + (index + 1) * _GOLDEN) & _MASK)
    return (_mix((x + lane * _GOLDEN) & _MASK) >> 40) * 2.0**-24
