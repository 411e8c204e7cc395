"""Sizes in bytes: read from options, and written for people.

Texts for people use decimal units (1 GB is 1,000,000,000 bytes), as model hubs, disks and macOS do. The
page has the same formatter in `api/web/format.js`.
"""

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


def format_bytes(count: int) -> str:
    """A size for people: `512 B`, `4.0 kB`, `102 MB`, `8.2 GB`."""
    size = float(count)
    for unit in ("B", "kB", "MB"):
        shown = f"{size:.0f}" if unit == "B" or abs(size) >= 9.95 else f"{size:.1f}"
        if abs(float(shown)) < 1000:
            return f"{shown} {unit}"
        size /= 1000
    return f"{size:,.1f} GB" if abs(size) < 999.95 else f"{size / 1000:,.1f} TB"
