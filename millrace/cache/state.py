"""A model's state in pieces: cut out of a row's caches, put together again, and made plain for disk.

Knows mlx-lm's cache classes and nothing of trees or requests. Layers with a plain KVCache give
segments, which can be cut anywhere; all others give checkpoints.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import mlx.core as mx
import numpy as np
from mlx_lm.models import cache as classes
from mlx_lm.models.cache import (
    CacheList,
    ChunkedKVCache,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from millrace.cache.payload import Payload
from millrace.cache.planner import Layers
from millrace.cache.sizes import StateSizes, Window
from millrace.models.load import WARM_UP_TOKENS

_GROUP = 32
_BITS = 8


@dataclass(frozen=True)
class Layout:
    """Which layers of a model can be cut."""

    kinds: tuple[str, ...]
    cuttable: tuple[int, ...]
    rest: tuple[int, ...]
    needs: Layers

    @classmethod
    def of(cls, model: Any, used: Sequence[Any] | None = None) -> Layout:
        """`used` are caches that a prompt has run on: layers that left theirs empty have no state."""
        caches = make_prompt_cache(model)
        kinds = tuple(type(c).__name__ for c in caches)
        whole = [i for i, c in enumerate(caches) if type(c) is KVCache]
        cuttable = tuple(i for i in whole if used is None or used[i].keys is not None)
        rest = tuple(i for i, c in enumerate(caches) if type(c) is not KVCache)
        windows = [caches[i].max_size for i in rest if isinstance(caches[i], RotatingKVCache)]
        window = min(windows) if windows and len(windows) == len(rest) else None
        return cls(kinds, cuttable, rest, Layers(bool(rest), window))


@dataclass
class KVSegment:
    """Keys and values of a run of tokens, layer by layer; each may be stored in eight bits."""

    arrays: list[mx.array]
    length: int
    packed: bool = False

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in self.arrays)

    def cut(self, start: int, end: int) -> Self:
        arrays = [mx.contiguous(a[:, :, start:end]) for a in self.arrays]
        mx.async_eval(arrays)
        return type(self)(arrays, end - start, self.packed)


def joined(segments: Sequence[KVSegment]) -> KVSegment:
    """Segments that follow each other, as one."""
    first = segments[0]
    layers = zip(*(s.arrays for s in segments), strict=True)
    arrays = [mx.concatenate(parts, axis=2) for parts in layers]
    mx.async_eval(arrays)
    return KVSegment(arrays, sum(s.length for s in segments), first.packed)


def segment_of(parts: Sequence[tuple[mx.array, mx.array]], length: int, pack: bool) -> KVSegment:
    """A segment from (keys, values) per layer; copies, once evaluated, so that no more is held."""
    arrays: list[mx.array] = []
    for pair in parts:
        for array in pair:
            if pack and array.shape[-1] % _GROUP == 0:
                arrays += mx.quantize(array, group_size=_GROUP, bits=_BITS)
            else:
                arrays.append(mx.contiguous(array))
    return KVSegment(arrays, length, pack)


class StateCheckpoint:
    """The state of the layers that cannot be cut, at one place."""

    def __init__(self, caches: dict[int, Any]) -> None:
        self.caches = caches
        self.nbytes = sum(int(c.nbytes) for c in caches.values())


def checkpoint_of(layout: Layout, caches: Sequence[Any] | Mapping[int, Any]) -> StateCheckpoint:
    """From a single row's caches, by layer; a copy that later steps leave alone."""
    kept = {i: copy.deepcopy(caches[i]) for i in layout.rest}
    for cache in kept.values():
        _settle(cache)
    mx.async_eval([a for c in kept.values() for a in _arrays(c.state)])
    return StateCheckpoint(kept)


def _settle(cache: Any) -> None:
    """Let go of buffers larger than the state in them."""
    if isinstance(cache, CacheList):
        for part in cache.caches:
            _settle(part)
    elif isinstance(cache, RotatingKVCache) and cache.keys is not None:
        ordered = [cache._temporal_order(a) for a in (cache.keys, cache.values)]
        keep = min(ordered[0].shape[2], cache.max_size)
        if cache.keep:
            return
        cache.keys, cache.values = (mx.contiguous(a[:, :, -keep:]) for a in ordered)
        cache._idx = keep
    elif isinstance(cache, (KVCache, ChunkedKVCache)) and cache.keys is not None:
        length = cache.offset
        if isinstance(cache, ChunkedKVCache):
            cache.maybe_trim_front()
            length -= cache.start_position
        cache.keys, cache.values = (
            mx.contiguous(a[:, :, :length]) for a in (cache.keys, cache.values)
        )


def sizes_of(layout: Layout, caches: Sequence[Any], pack: bool) -> StateSizes:
    """What the state of a model takes, from a single row's caches after a token or more."""
    per_token = 0
    for i in layout.cuttable:
        for array in (caches[i].keys, caches[i].values):
            heads, width = array.shape[1], array.shape[3]
            item = array.nbytes // array.size
            if pack and width % _GROUP == 0:
                per_token += heads * (width * _BITS // 8 + 2 * (width // _GROUP) * item)
            else:
                per_token += heads * width * item
    flat = 0
    windows: list[Window] = []
    for cache in _flat([caches[i] for i in layout.rest]):
        if isinstance(cache, (KVCache, RotatingKVCache, ChunkedKVCache)):
            most = getattr(cache, "max_size", None) or getattr(cache, "chunk_size", None)
            windows.append(Window(cache.nbytes // cache.keys.shape[2], most))
        else:
            flat += int(cache.nbytes)
    return StateSizes(per_token, flat, tuple(windows))


def measured_sizes(model: Any, layout: Layout, pack: bool) -> StateSizes:
    """The same for a model of which no caches are at hand: runs it once."""
    caches = make_prompt_cache(model)
    mx.eval(model(mx.array([[0] * WARM_UP_TOKENS], mx.int32), cache=caches))
    return sizes_of(layout, caches, pack)


def _flat(caches: Sequence[Any]) -> list[Any]:
    return [part for c in caches for part in (_flat(c.caches) if isinstance(c, CacheList) else [c])]


@dataclass
class RestoredState:
    """The state of a sequence's first tokens, as a runner takes it over."""

    caches: list[Any]
    """mlx-lm's, by layer; those of layers whose state is in `pages` are empty."""
    pages: list[int] | None = None
    """Where the keys and values of the layers that can be cut lie, if not in their caches."""


def restore_segments(
    caches: list[Any], layout: Layout, segments: Sequence[KVSegment], at: int
) -> None:
    """Give a row's empty caches `at` tokens, from segments that hold at least those."""
    for n, i in enumerate(layout.cuttable):
        keys, values = _joined(segments, n, at)
        caches[i].keys, caches[i].values, caches[i].offset = keys, values, at


def restore_checkpoint(
    caches: list[Any], layout: Layout, checkpoint: StateCheckpoint, made_at: int, at: int
) -> None:
    """Give a row's empty caches the layers that cannot be cut, cut back to `at` tokens all the same."""
    for i in layout.rest:
        caches[i] = copy.deepcopy(checkpoint.caches[i])
        if made_at > at:
            caches[i].trim(made_at - at)


def _joined(segments: Sequence[KVSegment], layer: int, at: int) -> tuple[mx.array, mx.array]:
    found = []
    for which in (0, 1):
        parts = [_tensor(s, 2 * layer + which) for s in segments]
        whole = parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=2)
        found.append(mx.contiguous(whole[:, :, :at]) if whole.shape[2] > at else whole)
    return found[0], found[1]


def _tensor(segment: KVSegment, number: int) -> mx.array:
    if not segment.packed:
        # A new handle: a cache writes into the array that it holds.
        return segment.arrays[number][...]
    at = 0
    for _ in range(number):
        at += 3 if segment.arrays[at].dtype == mx.uint32 else 1
    first = segment.arrays[at]
    if first.dtype != mx.uint32:
        return first[...]
    w, scales, biases = segment.arrays[at : at + 3]
    return mx.dequantize(w, scales, biases, group_size=_GROUP, bits=_BITS)


def segment_payload(segment: KVSegment) -> Payload:
    """As plain arrays; waits for the device."""
    mx.eval(segment.arrays)
    arrays = {f"{i:04d}": _plain(a) for i, a in enumerate(segment.arrays)}
    meta = {"packed": segment.packed, "types": [_name(a) for a in segment.arrays]}
    return Payload(arrays, json.dumps(meta))


def segment_from(payload: Payload) -> KVSegment:
    meta = json.loads(payload.meta)
    names = sorted(payload.arrays)
    arrays = [_array(payload.arrays[n], t) for n, t in zip(names, meta["types"], strict=True)]
    length = arrays[0].shape[2] if arrays else 0
    return KVSegment(arrays, length, meta["packed"])


def checkpoint_payload(checkpoint: StateCheckpoint) -> Payload:
    arrays: dict[str, Any] = {}
    types: dict[str, str] = {}

    def flat(value: Any) -> Any:
        if isinstance(value, mx.array):
            name = f"{len(arrays):04d}"
            arrays[name], types[name] = _plain(value), _name(value)
            return {"array": name}
        if isinstance(value, (list, tuple)):
            return [flat(v) for v in value]
        return {"value": value}

    mx.eval([a for c in checkpoint.caches.values() for a in _arrays(c.state)])
    layers = {
        str(i): [type(c).__name__, flat(c.state)] for i, c in sorted(checkpoint.caches.items())
    }
    return Payload(arrays, json.dumps({"layers": layers, "types": types}))


def checkpoint_from(payload: Payload) -> StateCheckpoint:
    meta = json.loads(payload.meta)

    def build(value: Any) -> Any:
        if isinstance(value, list):
            return [build(v) for v in value]
        if "array" in value:
            name = value["array"]
            return _array(payload.arrays[name], meta["types"][name])
        return value["value"]

    caches = {
        int(i): getattr(classes, name).from_state(build(state))
        for i, (name, state) in meta["layers"].items()
    }
    return StateCheckpoint(caches)


def _arrays(state: Any) -> list[mx.array]:
    if isinstance(state, mx.array):
        return [state]
    if isinstance(state, (list, tuple)):
        return [a for item in state for a in _arrays(item)]
    return []


def _plain(array: mx.array) -> Any:
    """As numpy, whose types know no bfloat16."""
    if array.dtype == mx.bfloat16:
        array = array.view(mx.uint16)
        mx.eval(array)
    return np.array(array, copy=False)


def _array(plain: Any, name: str) -> mx.array:
    array = mx.array(np.ascontiguousarray(plain))
    return array.view(mx.bfloat16) if name == "bfloat16" else array


def _name(array: mx.array) -> str:
    return str(array.dtype).rpartition(".")[2]
