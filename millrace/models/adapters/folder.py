"""An adapter's folder, in mlx-lm's form or PEFT's, as pairs of factors by module.

It knows what the two forms write and what of them cannot be honoured; which modules a model has is
`fitting`'s business.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from millrace.errors import AdapterError, AdapterUnreadable
from millrace.models.adapters import peft
from millrace.models.adapters.tensors import Floats, arrays, new_digest, read_bytes

CONFIG = "adapter_config.json"
MOST_RANK = 1024
_MOST_CONFIG = 1 << 20
_REMEDY = ": raise --lora-memory, or use an adapter of a lower rank"
_KEYS = ("peft_type", "lora_parameters", "fine_tune_type")
"""Of which an adapter's configuration has at least one."""


@dataclass(frozen=True)
class Factors:
    """What an adapter adds to a module's outputs: x times `a` times `b`, the scale in `b`."""

    a: Floats
    """(inputs, rank)"""
    b: Floats
    """(rank, outputs)"""

    @property
    def rank(self) -> int:
        return int(self.a.shape[1])


@dataclass(frozen=True)
class Adapter:
    digest: str
    """Of the folder's files: another digest is another adapter, whatever its name."""
    modules: Mapping[str, Factors]

    @property
    def rank(self) -> int:
        return max(f.rank for f in self.modules.values())


def config_of(folder: Path, digest: Any) -> dict[str, Any]:
    """The configuration in an adapter's folder; raises AdapterUnreadable where it has none of a known
    form."""
    if not os.path.isdir(folder):
        raise AdapterUnreadable(f"There is no adapter folder {folder}.")
    raw = read_bytes(folder / CONFIG, _MOST_CONFIG, digest)
    try:
        config = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise AdapterUnreadable(f"{folder / CONFIG} is not valid JSON: {error}.") from error
    if not isinstance(config, dict):
        raise AdapterUnreadable(f"{folder / CONFIG} should hold a JSON object.")
    if not any(key in config for key in _KEYS):
        raise AdapterUnreadable(
            f"{folder / CONFIG} is neither PEFT's (no peft_type) nor mlx-lm's (no lora_parameters)."
        )
    return config


def read(folder: Path, most: int) -> Adapter:
    """The adapter in a folder, whose weights may have so many bytes; raises AdapterError."""
    digest = new_digest()
    config = config_of(folder, digest)
    if "peft_type" in config:
        file = _weights(folder, "adapter_model.safetensors", "adapter_model.bin")
        pairs = peft.pairs(config, arrays(read_bytes(file, most, digest, _REMEDY), file), folder)
    else:
        file = _weights(folder, "adapters.safetensors", "adapters.npz")
        pairs = _mlx_pairs(config, arrays(read_bytes(file, most, digest, _REMEDY), file), folder)
    if not pairs:
        raise AdapterError(f"{file} holds no LoRA weights.")
    modules = {name: _factors(name, *pair, folder) for name, pair in pairs.items()}
    return Adapter(digest.hexdigest(), modules)


def _weights(folder: Path, name: str, older: str) -> Path:
    if not (folder / name).is_file() and (folder / older).is_file():
        raise AdapterError(
            f"{folder} has its weights in {older}, which is not read; convert them to {name}."
        )
    return folder / name


def _factors(name: str, a: Floats, b: Floats, scale: float, folder: Path) -> Factors:
    """Checked, and the scale in `b`."""
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0] or 0 in (*a.shape, *b.shape):
        raise AdapterError(
            f"{folder}: the factors of {name} are {a.shape} and {b.shape}, which are no (inputs, rank) "
            "and (rank, outputs)."
        )
    if a.shape[1] > MOST_RANK:
        raise AdapterError(
            f"{folder}: {name} has rank {a.shape[1]}; at most {MOST_RANK} is served."
        )
    if not math.isfinite(scale):
        raise AdapterError(f"{folder}: the scale of {name} is not finite.")
    with np.errstate(over="ignore"):
        scaled = b * np.float32(scale)
    if not np.isfinite(scaled).all():
        raise AdapterError(f"{folder}: the scaled factors of {name} are not finite.")
    return Factors(np.ascontiguousarray(a), np.ascontiguousarray(scaled))


def _mlx_pairs(
    config: Mapping[str, Any], weights: Mapping[str, Floats], folder: Path
) -> dict[str, tuple[Floats, Floats, float]]:
    kind = config.get("fine_tune_type", "lora")
    if kind != "lora":
        raise AdapterError(
            f"{folder}: the adapter is of type {str(kind)[:100]}; only LoRA is served."
        )
    parameters = config.get("lora_parameters")
    if not isinstance(parameters, dict):
        raise AdapterError(f"{folder / CONFIG} has no lora_parameters.")
    scale, rank = parameters.get("scale"), parameters.get("rank")
    if isinstance(scale, bool) or not isinstance(scale, int | float):
        raise AdapterError(f"{folder / CONFIG}: lora_parameters has no number as scale.")
    halves: dict[str, dict[str, Floats]] = {}
    for key, value in weights.items():
        name, _, part = key.rpartition(".")
        if part not in ("lora_a", "lora_b"):
            raise AdapterError(f"{folder}: {key} is no weight of a LoRA adapter.")
        if value.ndim != 2:
            raise AdapterError(
                f"{folder}: {name} is a layer of experts; adapters of those are not served."
            )
        halves.setdefault(name, {})[part] = value
    for name, found in halves.items():
        if len(found) != 2:
            raise AdapterError(f"{folder}: {name} has only one of lora_a and lora_b.")
        if rank is not None and found["lora_a"].shape[1] != rank:
            raise AdapterError(
                f"{folder}: {name} has rank {found['lora_a'].shape[1]}, and {CONFIG} says "
                f"{str(rank)[:100]}."
            )
    return {name: (f["lora_a"], f["lora_b"], _number(scale)) for name, f in halves.items()}


def _number(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf
