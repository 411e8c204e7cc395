"""A vision tower in stages: what it computes of a picture, cut into pieces of about the same work.

MLX computes nothing before it is asked to. So a picture's whole way through the tower is laid out at once,
by mlx-vlm's own code, and then asked for stage by stage with other work in between. While it is laid out,
products and layers that treat rows alike run block of rows by block, and attention block of queries by
block, where the whole would be more than one stage: the numbers are the same. How large a stage is follows
from the model and its device alone, never from a clock.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

ROWS = 16
"""Blocks are of so many rows or a multiple: fewer make products slow."""
_MUCH = 1.5
"""What is less than so many stages is not cut."""


@dataclass(frozen=True)
class Pace:
    """What costs how much on a device, in operations of a matrix product."""

    step: float
    """What a stage may cost, for each byte of the text tower's weights: a part of what reading them, which
    is a step of the streams, takes."""
    score: float
    """A score of attention, beside its products."""
    value: float
    """A value that is computed by itself."""
    compiles: bool = True
    """Whether MLX may compile functions there; where it may not, that stays so."""


CPU = Pace(step=1.0, score=2600, value=100, compiles=False)
METAL = Pace(step=8.0, score=20, value=20)


def pace_here() -> Pace | None:
    """None where stages are the tower's layers and their halves: CUDA plans attention for every new shape,
    and is through with a layer in no time."""
    if mx.default_device() == mx.cpu:
        return CPU
    return METAL if mx.metal.is_available() else None


class Stages:
    """What the tower gave the last time it was laid out, in order."""

    def __init__(self, model: Any, pace: Pace | None) -> None:
        """Finds the tower's layers: the longest list of like modules outside the text tower."""
        self._text = model.language_model
        self._pace = pace
        self._unit = math.inf
        self._laying_out = False
        self._kinds: dict[tuple[type, Callable[..., Any]], type] = {}
        """The classes of modules that are called through us."""
        self._stages: list[list[mx.array]] = []
        self._open: list[mx.array] = []
        self._work = 0.0
        towers = [part for name, part in model.items() if name != "language_model"]
        for layer in max((found for part in towers for found in _lists(part)), key=len, default=[]):
            for half in layer.values():
                if _has_parts(half):  # attention, and what follows it
                    self._becomes(half, self._staged)
            self._becomes(layer, self._staged)
        for part in towers if pace is not None else ():
            self._cut(part)

    @contextmanager
    def laying_out(self) -> Iterator[list[list[mx.array]]]:
        """Within it the tower is called; the stages are complete at its end."""
        if self._pace is not None and self._unit == math.inf:
            weights = sum(int(w.nbytes) for _, w in tree_flatten(self._text.parameters()))
            self._unit = max(1.0, self._pace.step * weights)
        stages: list[list[mx.array]] = []
        self._stages = stages
        self._open, self._work = [], 0.0
        with self._cutting(self._pace) if self._pace is not None else nullcontext():
            self._laying_out = True
            try:
                yield stages
                self._close()
            finally:
                self._laying_out = False

    @contextmanager
    def _cutting(self, pace: Pace) -> Iterator[None]:
        """Have the tower call our attention; its code looks that up where it calls it.

        One thread owns MLX: nobody else does meanwhile. A compiled function is not traced again for the
        same shapes, and would hold what was cut for another picture.
        """
        whole = mx.fast.scaled_dot_product_attention
        mx.fast.scaled_dot_product_attention = self._attention_by_queries(whole, pace)
        mx.disable_compile()
        try:
            yield
        finally:
            mx.fast.scaled_dot_product_attention = whole
            if pace.compiles and "MLX_DISABLE_COMPILE" not in os.environ:
                mx.enable_compile()

    def _note(self, given: mx.array, work: float) -> None:
        """Something has been laid out that can be waited for."""
        self._open.append(given)
        self._work += work
        if self._work >= self._unit:
            self._close()

    def _close(self) -> None:
        if self._open:
            self._stages.append(self._open)
        self._open, self._work = [], 0.0

    def _blocks(self, rows: int, work: float, grain: int = ROWS) -> list[slice]:
        """The blocks in which so many rows, which cost so much together, are run."""
        count = 1 if work < _MUCH * self._unit else math.ceil(work / self._unit)
        size = max(1, -(-rows // count))
        size = -(-size // grain) * grain
        return [slice(begin, min(begin + size, rows)) for begin in range(0, rows, size)]

    # How modules are called

    def _cut(self, part: Any) -> None:
        """Let all that treats rows alike, in a part of the model, run in blocks."""
        if isinstance(part, list):
            for each in part:
                self._cut(each)
        elif isinstance(part, nn.Module):
            if _treats_rows_alike(part):
                self._becomes(part, self._by_rows)
            elif isinstance(part, nn.Conv2d | nn.Conv3d) and _of_patches(part):
                self._becomes(part, self._by_patches)
            for each in part.values():
                self._cut(each)

    def _becomes(self, module: Any, run: Callable[..., Any]) -> None:
        """The same module, which is called through `run` while a picture is laid out."""
        kind = type(module)
        if (known := self._kinds.get((kind, run))) is not None:
            object.__setattr__(module, "__class__", known)
            return

        def call(self_: Any, *args: Any, **more: Any) -> Any:
            if not self._laying_out:
                return kind.__call__(self_, *args, **more)
            return run(self_, lambda *a, **m: kind.__call__(self_, *a, **m), *args, **more)

        made = self._kinds[kind, run] = type(kind.__name__, (kind,), {"__call__": call})
        object.__setattr__(module, "__class__", made)

    def _staged(self, module: Any, call: Callable[..., Any], *args: Any, **more: Any) -> Any:
        if (bounds := more.get("cu_seqlens")) is not None:
            more["cu_seqlens"] = _without_empty(bounds)
        given = call(*args, **more)
        arrays = [value for _, value in tree_flatten(given) if isinstance(value, mx.array)]
        if arrays:
            self._note(arrays[0], self._values(arrays[0]))
            if self._pace is None:
                self._close()
        return given

    def _by_rows(self, module: Any, call: Callable[..., Any], *args: Any, **more: Any) -> Any:
        if self._pace is None or more or len(args) != 1:
            return call(*args, **more)
        x = args[0]
        lead = x.shape[:-1]
        rows = math.prod(lead)
        work = rows * _row_work(module, self._pace)
        blocks = self._blocks(rows, work)
        if len(blocks) == 1:
            given = self._alone(call, x)
            self._note(given, work)
            return given
        flat = x.reshape(rows, x.shape[-1])
        parts = []
        for block in blocks:
            parts.append(self._alone(call, flat[block]))
            self._note(parts[-1], work * parts[-1].shape[0] / rows)
        return mx.concatenate(parts).reshape(*lead, -1)

    def _by_patches(self, module: Any, call: Callable[..., Any], x: mx.array) -> mx.array:
        """A convolution whose patches do not overlap: rows of patches, one picture or many."""
        axis, grain = (0, ROWS) if x.shape[0] > 1 else (1, module.weight.shape[1])
        taken = math.prod(x.shape[:-1]) // math.prod(module.weight.shape[1:-1])
        work = 2.0 * module.weight.size * taken
        blocks = self._blocks(x.shape[axis], work, grain)
        parts = [call(x[block] if axis == 0 else x[:, block]) for block in blocks]
        for part in parts:
            self._note(part, work / len(parts))
        return mx.concatenate(parts, axis=axis) if len(parts) > 1 else parts[0]

    def _attention_by_queries(
        self, whole: Callable[..., mx.array], pace: Pace
    ) -> Callable[..., mx.array]:
        def attention(
            q: mx.array, k: mx.array, v: mx.array, *, mask: Any = None, **more: Any
        ) -> mx.array:
            simple = mask is None or isinstance(mask, mx.array)
            if not simple or more.keys() - {"scale"}:
                return whole(q, k, v, mask=mask, **more)
            for given in (q, k):
                self._note(given, 4 * self._values(given))  # turned by their positions, as a rule
            each = q.shape[0] * q.shape[1] * k.shape[2]
            work = float(each * q.shape[2] * (4 * q.shape[3] + pace.score))
            parts = []
            for block in self._blocks(q.shape[2], work):
                seen = mask
                if mask is not None and mask.ndim > 1 and mask.shape[-2] > 1:
                    seen = mask[..., block, :]
                parts.append(whole(q[:, :, block], k, v, mask=seen, **more))
                self._note(parts[-1], work * parts[-1].shape[2] / q.shape[2])
            return mx.concatenate(parts, axis=2) if len(parts) > 1 else parts[0]

        return attention

    def _alone(self, call: Callable[..., mx.array], rows: mx.array) -> mx.array:
        """Run a block as it is, and what is in it with it."""
        self._laying_out = False
        try:
            return call(rows)
        finally:
            self._laying_out = True

    def _values(self, given: mx.array) -> float:
        return self._pace.value * given.size if self._pace is not None else 0.0


def _treats_rows_alike(module: Any) -> bool:
    return isinstance(module, nn.Linear | nn.QuantizedLinear) or (
        type(module).__name__.endswith("MLP") and _has_parts(module)
    )


def _of_patches(module: Any) -> bool:
    """Whether a convolution's patches lie side by side."""
    sides = tuple(module.weight.shape[1:-1])
    zeros, ones = (0,) * len(sides), (1,) * len(sides)
    return (_each(module.stride, sides), _each(module.padding, sides)) == (sides, zeros) and (
        _each(getattr(module, "dilation", 1), sides) == ones and getattr(module, "groups", 1) == 1
    )


def _each(value: Any, sides: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(value) if isinstance(value, tuple | list) else (value,) * len(sides)


def _row_work(module: Any, pace: Pace) -> float:
    """What one row costs: its products, and in between what is computed value by value."""
    work, values = 0.0, 0
    products = [m for _, m in module.named_modules() if hasattr(m, "weight") and m.weight.ndim == 2]
    for product in products:
        out, width = product.weight.shape
        if bits := getattr(product, "bits", None):
            width = width * 32 // bits
        work += 2.0 * out * width
        values += out
    return work + (pace.value * values if len(products) > 1 else 0)


def _without_empty(bounds: mx.array) -> mx.array:
    """Where windows of patches end, each once: attention over none at all ends the process on CUDA."""
    ends = bounds.tolist()
    unique = sorted(set(ends))
    return bounds if len(unique) == len(ends) else mx.array(unique, bounds.dtype)


def _lists(part: Any) -> list[list[Any]]:
    """Lists of two modules or more that are of one class, anywhere in a part of a model."""
    found: list[list[Any]] = []
    if isinstance(part, list):
        if len(part) > 1 and all(type(p) is type(part[0]) for p in part) and _has_parts(part[0]):
            found.append(part)
        for each in part:
            found += _lists(each)
    elif isinstance(part, dict):
        for each in part.values():  # a module is a dictionary of its parts
            found += _lists(each)
    return found


def _has_parts(part: Any) -> bool:
    """One with parts of its own, not a bare product or norm."""
    return isinstance(part, nn.Module) and bool(part.children())
