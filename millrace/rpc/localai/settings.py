"""What the door of a backend tells the process behind it."""

from __future__ import annotations

from typing import Literal

import msgspec

from millrace.config import EngineConfig

Name = Literal["mlx", "mlx-vlm", "mlx-distributed"]
"""Which of LocalAI's backends one stands for."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    address: str
    name: Name
    engine: EngineConfig
    """What all engines are told alike."""
    drain: float
    """Seconds that running answers get when their model is let go of."""
