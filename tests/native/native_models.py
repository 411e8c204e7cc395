"""Tiny random models of the kinds that run by our own kernels, and the same in MLX with float32 weights."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt
from mlx.utils import tree_map
from mlx_lm.models.cache import KVCache
from mlx_lm.utils import dequantize_model

from millrace.native.model import NativeModel
from millrace.native.plan import plan

Array = npt.NDArray[Any]
VOCAB = 203
"""No multiple of anything, so that the head is padded."""


@dataclass(frozen=True)
class Kind:
    """What a model is like."""

    kind: str = "llama"
    heads: tuple[int, int] = (4, 2)
    head_size: int = 64
    hidden: int = 128
    layers: int = 2
    dtype: mx.Dtype = mx.float32
    bits: int = 0
    group: int = 64
    more: dict[str, Any] = field(default_factory=dict)
    seed: int = 0

    def build(self) -> Any:
        """The model as mlx-lm has it."""
        module = importlib.import_module(f"mlx_lm.models.{self.kind}")
        settings = {
            "model_type": self.kind,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "intermediate_size": 192 if self.hidden % 96 == 0 else 256,
            "num_attention_heads": self.heads[0],
            "num_key_value_heads": self.heads[1],
            "head_dim": self.head_size,
            "rms_norm_eps": 1e-5,
            "vocab_size": VOCAB,
            "max_position_embeddings": 4096,
            "rope_theta": 10000.0,
            "tie_word_embeddings": True,
        }
        mx.random.seed(self.seed)
        model = module.Model(module.ModelArgs.from_dict(settings | self.more))
        if self.more.get("tied"):
            model.sanitize({})
        model.update(tree_map(self._random, model.parameters()))
        if self.bits:
            nn.quantize(model, self.group, self.bits)
        model.eval()
        mx.eval(model.parameters())
        return model

    def _random(self, value: mx.array) -> mx.array:
        spread = 0.3 if value.ndim == 1 else 1.5 / value.shape[-1] ** 0.5
        # Norms are about 1, biases about 0.
        ones = value.ndim == 1 and bool((value == 1).all()) and self.kind != "gemma3_text"
        return (mx.random.normal(value.shape) * spread + float(ones)).astype(self.dtype)

    def native(self, threads: int = 2) -> NativeModel:
        model = self.build()
        return NativeModel(plan(model), threads, model.args)

    def in_float32(self) -> Any:
        """The same numbers, with every weight a float32 of MLX's."""
        model = self.build()
        if self.bits:
            # Scales are widened first: what MLX writes out is rounded to their type.
            model.update(tree_map(_widened, model.parameters()))
            model = dequantize_model(model)
        model.update(tree_map(_widened, model.parameters()))
        return model


def _widened(value: mx.array) -> mx.array:
    return value if value.dtype == mx.uint32 else value.astype(mx.float32)


def random_tokens(length: int, seed: int = 0) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(0, VOCAB, length)]


def run(model: Any, tokens: list[int], cache: list[Any] | None = None) -> Array:
    """Logits of a run of tokens of one row."""
    cache = cache if cache is not None else plain_cache(model)
    return np.array(model(mx.array([tokens], mx.int32), cache=cache)[0])


def plain_cache(model: Any) -> list[Any]:
    """Caches that forget nothing, for layers with windows too: their masks say what is seen."""
    return [KVCache() for _ in model.layers]


def in_pieces(model: Any, tokens: list[int], borders: list[int]) -> Array:
    """The same tokens, with a pass for each piece."""
    cache = plain_cache(model)
    ends = [*borders, len(tokens)]
    pieces = [tokens[a:b] for a, b in zip([0, *borders], ends, strict=True)]
    return np.concatenate([run(model, piece, cache) for piece in pieces if piece])


def logprobs(logits: Array) -> Array:
    wide = logits.astype(np.float64)
    top = wide.max(-1, keepdims=True)
    found: Array = wide - top - np.log(np.exp(wide - top).sum(-1, keepdims=True))
    return found
