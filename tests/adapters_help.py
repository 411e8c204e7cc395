"""Adapter folders with random factors, and models with an adapter merged into their weights."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Pairs = dict[str, tuple[Floats, Floats]]
"""By module, (inputs, rank) and (rank, outputs)."""
SMALL = ("q_proj", "v_proj")


def linear_shapes(model: Any) -> dict[str, tuple[int, int]]:
    found = {}
    for name, layer in model.named_modules():
        if isinstance(layer, nn.QuantizedLinear):
            found[name] = (layer["scales"].shape[1] * layer.group_size, layer["scales"].shape[0])
        elif isinstance(layer, nn.Linear):
            found[name] = (layer.weight.shape[1], layer.weight.shape[0])
    return found


def random_pairs(
    shapes: Mapping[str, tuple[int, int]],
    rank: int = 4,
    seed: int = 0,
    targets: Collection[str] = (),
    size: float = 1.0,
) -> Pairs:
    """Factors whose product is about as large as the weights of the tiny models."""
    dice = np.random.default_rng(seed)
    pairs: Pairs = {}
    for name, (inputs, outputs) in shapes.items():
        if targets and name.rsplit(".", 1)[-1] not in targets:
            continue
        a = dice.standard_normal((inputs, rank)) / inputs**0.5
        b = dice.standard_normal((rank, outputs)) / rank**0.5 * size
        pairs[name] = a.astype(np.float32), b.astype(np.float32)
    return pairs


def write_mlx(folder: Path, pairs: Pairs, scale: float = 0.5, **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    weights = {}
    for name, (a, b) in pairs.items():
        weights |= {f"{name}.lora_a": mx.array(a), f"{name}.lora_b": mx.array(b)}
    mx.save_safetensors(str(folder / "adapters.safetensors"), weights)
    rank = next(iter(pairs.values()))[0].shape[1]
    settings = {
        "fine_tune_type": "lora",
        "num_layers": 2,
        "lora_parameters": {"rank": rank, "scale": scale, "dropout": 0.0},
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings | config))
    return folder


def write_peft(folder: Path, pairs: Pairs, alpha: float = 2.0, **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    weights = {}
    for name, (a, b) in pairs.items():
        stem = f"base_model.model.{name}"
        weights[f"{stem}.lora_A.weight"] = mx.contiguous(mx.array(a).T)
        weights[f"{stem}.lora_B.weight"] = mx.contiguous(mx.array(b).T)
    mx.save_safetensors(str(folder / "adapter_model.safetensors"), weights)
    rank = next(iter(pairs.values()))[0].shape[1]
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(settings | config))
    return folder


def merge(model: Any, pairs: Pairs, scale: float) -> Any:
    """The model with an adapter in its weights, W + scale · (A B)ᵀ."""
    layers = dict(model.named_modules())
    for name, (a, b) in pairs.items():
        layer = layers[name]
        layer.weight = layer.weight + mx.array(scale * (a @ b).T).astype(layer.weight.dtype)
    mx.eval(model.parameters())
    return model
