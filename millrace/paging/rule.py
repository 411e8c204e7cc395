"""How a layer attends, beside what it attends to."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import mlx.core as mx


@dataclass(eq=False)
class AttentionRule:
    scale: float
    window: int | None = None
    """Keys that a token sees, itself among them."""
    sinks: mx.array | None = None
    """One logit for each query head that takes part in the softmax and has no value."""

    @cached_property
    def numbers(self) -> mx.array:
        """The scale, and a bound on logits that no layer of mlx-lm's seam has: 0."""
        return mx.array([self.scale, 0.0], mx.float32)
