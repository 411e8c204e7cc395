"""Sizes in bytes as people write them."""

from __future__ import annotations

import re

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", re.IGNORECASE)
_POWERS = {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}


def bytes_in(text: str) -> int:
    """`8G`, `512M`, `1.5 GiB` or plain bytes; raises ValueError for anything else."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError("is not a size; write it like 8G or 512M")
    return int(float(match[1]) * (1 << _POWERS[match[2].lower()]))
