"""Tokens at positions that do not follow from their places in the cache, on mlx-lm's models.

A model's rotary embeddings are wrapped once, where something may want that; unless told otherwise they do
what they did, bit for bit. Told positions, a chunk's tokens become rows of a batch, of which each may have
an offset of its own. The queries that the last pass turned can be looked at.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
        self.positions: mx.array | None = None
        """Of every token of a single row."""
        self.shifts: mx.array | None = None
        """What each row's positions are beyond its places."""
        self.seen: dict[int, list[mx.array]] | None = None
        """What layers have turned, where that is looked at: queries first, then keys."""
        self._last: tuple[Any, mx.array | None] = (None, None)

    @contextmanager
    def at(self, positions: Sequence[int] | None) -> Iterator[None]:
        """Let the one row's tokens stand at these positions; None leaves them where they are."""
        self.positions = None if positions is None else mx.array(positions, mx.int32)
        try:
            yield
        finally:
            self.positions = None

    @contextmanager
    def shifted(self, shifts: mx.array | None) -> Iterator[None]:
        self.shifts = shifts
        try:
            yield
        finally:
            self.shifts, self._last = None, (None, None)

    @contextmanager
    def watched(self) -> Iterator[dict[int, list[mx.array]]]:
        seen: dict[int, list[mx.array]] = {}
        self.seen = seen
        try:
            yield seen
        finally:
            self.seen = None

    def shift(self, offset: int | mx.array) -> mx.array:
        """An offset with the rows' shifts; layers share the sum as they share the offset."""
        assert self.shifts is not None
        if self._last[0] is not offset or self._last[1] is None:
            self._last = offset, self.shifts + offset
        found = self._last[1]
        assert found is not None
        return found


class Rotation(nn.Module):  # type: ignore[misc]
    """One layer's rotary embedding."""

    def __init__(self, inner: Any, shared: Rotations, layer: int) -> None:
        super().__init__()
        self.inner = inner
        self._shared = shared
        self._layer = layer

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        shared = self._shared
        if shared.positions is not None:
            turned = self.inner(x.transpose(2, 1, 0, 3), offset=shared.positions)
            turned = turned.transpose(2, 1, 0, 3)
        elif shared.shifts is not None:
            turned = self.inner(x, offset=shared.shift(offset))
        else:
            turned = self.inner(x, offset=offset)
        if shared.seen is not None:
            shared.seen.setdefault(self._layer, []).append(turned)
        found: mx.array = turned
        return found


def rotate(model: Any) -> None:
    """Have a model take positions. Raises ModelError where it cannot; whatever is raised leaves it as it
    was."""
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


def peek(model: Any, token: mx.array, caches: list[Any]) -> tuple[mx.array, list[mx.array | None]]:
    """Run one token of one row: its logits, and what it looks for in each layer that looks at all keys,
    shaped (heads, size) and scaled; None for layers with a window."""
    rotations: Rotations = model.rotations
    with rotations.watched() as seen:
        logits = model(token, cache=caches)
    asked: list[mx.array | None] = []
    for layer, attention in enumerate(_attentions(model)):
        queries = seen[layer][0]
        scale = getattr(attention, "scale", queries.shape[-1] ** -0.5)
        wide = type(caches[layer]) is KVCache
        asked.append(queries[0, :, 0].astype(mx.float32) * scale if wide else None)
    return logits, asked


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
