"""The layers that follow the pooling: sentence-transformers' Dense modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.utils import infer_quant_config

from millrace.models.files import read_json

_ACTIVATIONS: dict[str, Callable[[mx.array], mx.array]] = {
    "Identity": lambda x: x,
    "Tanh": mx.tanh,
    "GELU": nn.gelu,
    "ReLU": nn.relu,
    "Sigmoid": mx.sigmoid,
    "SiLU": nn.silu,
}


class Dense(nn.Module):  # type: ignore[misc]
    def __init__(self, width: int, out: int, *, bias: bool, activation: str) -> None:
        super().__init__()
        self.linear = nn.Linear(width, out, bias=bias)
        if activation not in _ACTIVATIONS:
            raise ValueError(f"a Dense module's activation '{activation}' is not supported")
        self._activation = _ACTIVATIONS[activation]

    def __call__(self, x: mx.array) -> mx.array:
        return self._activation(self.linear(x))


def load_dense(folder: Path, path: str, number: int, others: Mapping[str, mx.array]) -> Dense:
    """The module in `path`; converted models keep its weights beside their own, as `dense.N`."""
    settings = read_json(folder / path / "config.json")
    named = str(settings.get("activation_function", "Identity")).rpartition(".")[2]
    layer = Dense(
        settings["in_features"],
        settings["out_features"],
        bias=bool(settings.get("bias", True)),
        activation=named,
    )
    file = folder / path / "model.safetensors"
    prefix = f"dense.{number}."
    if file.is_file():
        weights = dict(mx.load(str(file)))
    else:
        weights = {
            f"linear.{name.removeprefix(prefix)}": value
            for name, value in others.items()
            if name.startswith(prefix)
        }
    if not weights:
        raise ValueError(f"{file} is missing")
    fill(layer, weights)
    return layer


def fill(module: nn.Module, weights: dict[str, mx.array]) -> None:
    """Put weights into a module, whose layers are as quantised as the weights are."""

    def quantized(path: str, layer: nn.Module) -> bool | dict[str, object]:
        if f"{path}.scales" not in weights or not hasattr(layer, "to_quantized"):
            return False
        found: dict[str, object] = infer_quant_config(path, layer, weights)
        return found

    if any(name.endswith(".scales") for name in weights):
        nn.quantize(module, class_predicate=quantized)
    module.load_weights(list(weights.items()), strict=True)
