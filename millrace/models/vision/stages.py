"""A vision tower in parts: its layers and their halves, each of which leaves what it gives where it can be
waited for.

MLX computes nothing before it is asked to. So a picture's whole way through the tower is laid out at once,
and then asked for layer by layer, with other work in between.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten


class Stages:
    """What the layers of a tower gave the last time it was called, in order."""

    def __init__(self, model: Any) -> None:
        """Finds the tower's layers: the longest list of like modules outside the text tower."""
        self._given: list[mx.array] = []
        lists = [
            found
            for name, part in model.items()
            if name != "language_model"
            for found in _lists(part)
        ]
        layers = max(lists, key=len, default=[])
        for place, layer in enumerate(layers):
            for name, half in list(layer.items()):
                if _is_layer(half):  # attention, and what follows it
                    layer[name] = _Stage(half, self._given)
            layers[place] = _Stage(layer, self._given)

    def take(self) -> list[mx.array]:
        given = list(self._given)
        self._given.clear()
        return given


class _Stage(nn.Module):  # type: ignore[misc]
    def __init__(self, layer: Any, given: list[mx.array]) -> None:
        super().__init__()
        self.layer = layer
        self._note = given.append

    def __call__(self, *args: Any, **more: Any) -> Any:
        if (bounds := more.get("cu_seqlens")) is not None:
            more["cu_seqlens"] = _without_empty(bounds)
        given = self.layer(*args, **more)
        arrays = [value for _, value in tree_flatten(given) if isinstance(value, mx.array)]
        if arrays:
            self._note(arrays[0])
        return given


def _without_empty(bounds: mx.array) -> mx.array:
    """Where windows of patches end, each once: attention over none at all ends the process on CUDA."""
    ends = bounds.tolist()
    unique = sorted(set(ends))
    return bounds if len(unique) == len(ends) else mx.array(unique, bounds.dtype)


def _lists(part: Any) -> list[list[Any]]:
    """Lists of two modules or more that are of one class, anywhere in a part of a model."""
    found: list[list[Any]] = []
    if isinstance(part, list):
        if len(part) > 1 and all(type(p) is type(part[0]) for p in part) and _is_layer(part[0]):
            found.append(part)
        for each in part:
            found += _lists(each)
    elif isinstance(part, dict):
        for (
            each
        ) in part.values():  # a module is a dictionary of its parts, and gives copies of lists
            found += _lists(each)
    return found


def _is_layer(part: Any) -> bool:
    """One with parts of its own, not a bare product or norm."""
    return isinstance(part, nn.Module) and bool(part.children())
