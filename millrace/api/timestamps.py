"""Times of the monotonic clock as clients read them."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta


def moment(monotonic: float | None) -> str | None:
    """As a date with its time."""
    if monotonic is None:
        return None
    when = datetime.now(UTC) + timedelta(seconds=monotonic - time.monotonic())
    return when.isoformat().replace("+00:00", "Z")
