"""Weights as a device wants them."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import pytest

from millrace.models import placement
from millrace.models.placement import place


class Layer(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64, bias=False)


class Two(nn.Module):  # type: ignore[misc]
    def __init__(self, *, packed: bool) -> None:
        super().__init__()
        self.layers = [Layer(), Layer()]
        self.set_dtype(mx.float16)
        if packed:
            nn.quantize(self, group_size=32, bits=4)


def _types(model: nn.Module) -> set[mx.Dtype]:
    return {layer.linear["weight"].dtype for layer in model.layers}


def test_small_packed_weights_are_widened_on_cuda() -> None:
    assert _types(place(Two(packed=True), "auto", "cuda")) == {mx.bfloat16}
    assert _types(place(Two(packed=True), "keep", "cuda")) == {mx.uint32}
    assert _types(place(Two(packed=False), "auto", "cuda")) == {mx.float16}


def test_large_packed_weights_stay_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "WIDENED_ON_CUDA", 2 * 2 * 64 * 64 - 1)
    assert _types(place(Two(packed=True), "auto", "cuda")) == {mx.uint32}


def test_packed_weights_stay_on_metal() -> None:
    assert _types(place(Two(packed=True), "auto", "metal")) == {mx.uint32}
