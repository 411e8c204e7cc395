"""Loading: a model folder becomes a model on the device, with the facts the engine needs of it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_reduce
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from millrace.config import EngineConfig
from millrace.errors import ModelError
from millrace.models import device, placement
from millrace.models.window import window_of


@dataclass(frozen=True)
class LoadedModel:
    model: Any
    context: int
    vocab_size: int
    """The width of the logits, which may exceed the tokenizer's vocabulary."""
    dtype: str
    device: str
    native: bool
    """Whether kernels of our own run it."""
    weight_bytes: int
    memory: int
    """Bytes of the device that models and their state may take."""
    caches: list[Any]
    """The layers' state after the warm-up's one token: what a row is made of."""
    seconds: float


def load(config: EngineConfig) -> LoadedModel:
    """Load, place and warm up; every failure is a ModelError that names the folder."""
    start = time.monotonic()
    path = Path(config.model)
    device.configure()
    kind = device.kind()
    if kind == "cpu":
        # MLX would run the machine's C++ compiler for a few fused operations, which gain nothing
        # here, and keep the results in the temporary folder.
        mx.disable_compile()
    try:
        model, settings = load_model(path, lazy=True, trust_remote_code=config.trust_remote_code)
        model = placement.place(model, config.weights, kind, path)
        mx.eval(model.parameters())
        caches = make_prompt_cache(model)
        vocab, dtype = _warm_up(model, caches)
    except MemoryError as error:
        raise ModelError(f"{path} does not fit into this machine's memory.") from error
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, AttributeError) as error:
        raise ModelError(f"The model in {path} cannot be loaded: {error}") from error
    return LoadedModel(
        model=model,
        context=window_of(settings, config.context),
        vocab_size=vocab,
        dtype=dtype,
        device=kind,
        native=getattr(model, "in_place", False),
        weight_bytes=_weight_bytes(model),
        memory=device.describe().budget,
        caches=caches,
        seconds=time.monotonic() - start,
    )


def _warm_up(model: Any, caches: list[Any]) -> tuple[int, str]:
    """One token through the model: it works, its kernels are compiled, its logits' width is known."""
    logits = model(mx.array([[0]], mx.int32), cache=caches)
    mx.eval(logits)
    return int(logits.shape[-1]), str(logits.dtype).removeprefix("mlx.core.")


def _weight_bytes(model: Any) -> int:
    own: int | None = getattr(model, "nbytes", None)
    return tree_reduce(_add_bytes, model.parameters(), 0) if own is None else own


def _add_bytes(total: int, value: Any) -> int:
    return total + int(value.nbytes) if isinstance(value, mx.array) else total
