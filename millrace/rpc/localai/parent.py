"""The watch on the process that started this one: a backend does not outlive its LocalAI."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Mapping

from millrace.errors import SetupError

_OFF = ("false", "0", "no", "off")
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h)?")
_SECONDS = {"ms": 0.001, None: 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


def interval_of(environment: Mapping[str, str]) -> float | None:
    """Seconds between two looks; None where there is to be no watch."""
    if environment.get("LOCALAI_BACKEND_PARENT_WATCH", "").strip().lower() in _OFF:
        return None
    text = environment.get("LOCALAI_BACKEND_PARENT_WATCH_INTERVAL", "").strip() or "2s"
    match = _DURATION.fullmatch(text)
    seconds = float(match[1]) * _SECONDS[match[2]] if match else 0.0
    if seconds <= 0:
        raise SetupError(
            f"LOCALAI_BACKEND_PARENT_WATCH_INTERVAL must be a duration like 2s or 500ms, not '{text}'."
        )
    return seconds


async def orphaned(interval: float | None, parent: int) -> None:
    """Return when `parent` is no longer the parent; never where that cannot be told."""
    if interval is None or parent == 1:
        await asyncio.Event().wait()
    assert interval is not None
    while os.getppid() == parent:
        await asyncio.sleep(interval)
