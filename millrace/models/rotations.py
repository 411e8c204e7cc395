"""The rotary embeddings of mlx-lm's models: proof that positions enter a model there and nowhere else, and
what layers look for.

A model that is proven takes tokens at positions that do not follow from their places: the offset of every
row of a pass says where it stands. Rotary embeddings are wrapped once and do what they did, bit for bit;
the queries that the last pass turned can be looked at.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache
from mlx_lm.models.rope_utils import Llama3RoPE, ProportionalRoPE, SuScaledRoPE, YarnRoPE

from millrace.errors import ModelError

_KNOWN = (
    *("cohere", "gemma", "gemma2", "gemma3", "gemma3_text", "glm4", "gpt_oss", "granite", "llama"),
    *(
        "mixtral",
        "olmo2",
        "olmo3",
        "phi3",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_moe",
        "starcoder2",
    ),
)
"""Modules of mlx-lm's whose models turn queries, then keys, and use positions for nothing else."""
_TURNING = (nn.RoPE, Llama3RoPE, ProportionalRoPE, SuScaledRoPE, YarnRoPE)


class Rotations:
    """What all layers of a model share."""

    def __init__(self) -> None:
        self.seen: dict[int, list[mx.array]] | None = None
        """What layers have turned, where that is looked at: queries first, then keys."""

    @contextmanager
    def watched(self) -> Iterator[dict[int, list[mx.array]]]:
        seen: dict[int, list[mx.array]] = {}
        self.seen = seen
        try:
            yield seen
        finally:
            self.seen = None


class Rotation(nn.Module):  # type: ignore[misc]
    """One layer's rotary embedding."""

    def __init__(self, inner: Any, shared: Rotations, layer: int) -> None:
        super().__init__()
        self.inner = inner
        self._shared = shared
        self._layer = layer

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        turned: mx.array = self.inner(x, offset=offset)
        if self._shared.seen is not None:
            self._shared.seen.setdefault(self._layer, []).append(turned)
        return turned


def rotate(model: Any) -> None:
    """Prove that a model takes positions, and have its queries be seen. Raises ModelError where it does
    not; whatever is raised leaves it as it was."""
    if getattr(model, "in_place", False) or getattr(model, "rotations", None) is not None:
        return
    if getattr(model, "sees", False):
        raise ModelError("SpecPrefill does not work with models that take pictures.")
    attentions = _attentions(model)
    shared = Rotations()
    before = [attention.rope for attention in attentions]
    for layer, attention in enumerate(attentions):
        attention.rope = Rotation(attention.rope, shared, layer)
    try:
        _prove(model, shared)
    except Exception:
        for attention, rope in zip(attentions, before, strict=True):
            attention.rope = rope
        raise
    model.rotations = shared


def asked(model: Any, seen: dict[int, list[mx.array]]) -> list[mx.array | None]:
    """What the one token that was run looks for in each layer that looks at all keys, shaped (heads, size)
    and scaled; None for layers with a window."""
    found: list[mx.array | None] = []
    for layer, (attention, window) in enumerate(
        zip(_attentions(model), windows_of(model), strict=True)
    ):
        queries = seen[layer][0]
        scale = getattr(attention, "scale", queries.shape[-1] ** -0.5)
        found.append(None if window else queries[0, :, 0].astype(mx.float32) * scale)
    return found


def windows_of(model: Any) -> list[int]:
    """How far back each layer looks; 0 is to the beginning."""
    if getattr(model, "in_place", False):
        return [layer.window for layer in model.layers]
    return [getattr(c, "max_size", 0) or 0 for c in make_prompt_cache(model)]


def _attentions(model: Any) -> list[Any]:
    kind = type(model).__module__.rpartition(".")
    if kind[0] != "mlx_lm.models" or kind[2] not in _KNOWN:
        raise ModelError(_not_proven(model, "it may use positions in ways that are not known here"))
    caches = make_prompt_cache(model)
    if any(type(cache) not in (KVCache, RotatingKVCache) for cache in caches):
        raise ModelError(_not_proven(model, "its layers keep other state than keys and values"))
    found = [getattr(layer, "self_attn", None) for layer in model.layers]
    for attention in found:
        rope = getattr(attention, "rope", None)
        rope = rope.inner if isinstance(rope, Rotation) else rope
        if type(rope) not in _TURNING:
            name = type(rope).__name__ if rope is not None else "none"
            raise ModelError(_not_proven(model, f"its rotary embedding is of the kind {name}"))
    return found


def _prove(model: Any, shared: Rotations) -> None:
    """What is turned first must be queries, and second the keys that the cache gets."""
    caches = make_prompt_cache(model)
    with shared.watched() as seen:
        mx.eval(model(mx.array([[0, 1, 0]], mx.int32), cache=caches))
    for layer, cache in enumerate(caches):
        turned = seen.get(layer, [])
        keys = cache.keys[:, :, :3] if cache.keys is not None else None
        if len(turned) != 2 or keys is None or not mx.array_equal(turned[1], keys):
            raise ModelError(_not_proven(model, f"layer {layer} does not turn queries, then keys"))


def _not_proven(model: Any, why: str) -> str:
    kind = getattr(model, "model_type", type(model).__name__)
    return f"SpecPrefill does not work with models of the kind {kind}: {why}."
