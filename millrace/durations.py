"""How long something is to stay, as people and Ollama's clients write it: 300, "5m", "1h30m", -1."""

from __future__ import annotations

import math
import re

_UNITS = {
    "ns": 1e-9,
    "us": 1e-6,
    "µs": 1e-6,
    "μs": 1e-6,
    "ms": 1e-3,
    "s": 1.0,
    "m": 60.0,
    "h": 3600.0,
}
_PART = r"(\d+\.?\d*|\.\d+)(ns|us|µs|μs|ms|s|m|h)"
_WHOLE = re.compile(rf"([-+]?)((?:{_PART})+)", re.ASCII)
_PLAIN = re.compile(r"[-+]?(\d{1,20}\.?\d*|\.\d+)", re.ASCII)
LONGEST = 1e9
"""Seconds; longer is for ever."""


def seconds_of(value: str | float) -> float:
    """Seconds; below 0 is for ever. Raises ValueError with what is wrong."""
    if isinstance(value, str):
        seconds = _read(value.strip())
    else:
        seconds = float(value)
    if math.isnan(seconds):
        raise ValueError("is not a length of time")
    return -1.0 if seconds < 0 or seconds > LONGEST else seconds


def _read(text: str) -> float:
    if len(text) > 100:
        raise ValueError("is not a length of time like 300, '5m' or -1")
    if _PLAIN.fullmatch(text):
        return float(text)
    whole = _WHOLE.fullmatch(text)
    if whole is None:
        raise ValueError(f"is '{text}', which is not a length of time like 300, '5m' or -1")
    total = sum(float(number) * _UNITS[unit] for number, unit in re.findall(_PART, whole[2]))
    return -total if whole[1] == "-" else total
