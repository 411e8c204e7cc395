"""What turns a text's states into a classifier's logits, as each family has it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from millrace.models.encoders.activations import activation
from millrace.models.encoders.facts import Pooling
from millrace.models.encoders.pooling import pool

_ACTIVATIONS = {"distilbert": "relu", "electra": "gelu"}


class Head(nn.Module):  # type: ignore[misc]
    def __init__(self, config: Mapping[str, Any], width: int, labels: int) -> None:
        super().__init__()
        family = config["model_type"]
        modern = family == "modernbert"
        self.dense = nn.Linear(
            width, width, bias=not modern or config.get("classifier_bias", False)
        )
        if modern:
            eps = config.get("norm_eps", 1e-5)
            self.norm = nn.LayerNorm(width, eps=eps, bias=config.get("norm_bias", False))
        self.out = nn.Linear(width, labels)
        named = config.get("classifier_activation", "gelu") if modern else None
        self._activation = activation(named or _ACTIVATIONS.get(family, "tanh"))
        self._ways: tuple[Pooling] = ("cls",)
        if modern and config.get("classifier_pooling", "cls") == "mean":
            self._ways = ("mean",)

    def __call__(self, states: mx.array, lengths: list[int]) -> mx.array:
        """(rows, tokens, width) to (rows, labels)."""
        pooled = pool(states, lengths, self._ways, [0] * len(lengths)).astype(states.dtype)
        found = self._activation(self.dense(pooled))
        norm: Any = self.get("norm")
        return self.out(found if norm is None else norm(found)).astype(mx.float32)
