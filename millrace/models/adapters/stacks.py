"""Adapters of many rows in one forward pass of MLX's: their factors stacked, each row by its own slot.

A module that any adapter changes is wrapped once. Slot 0 is nothing at all: zeros. Ranks are padded, the
scale lies in the second factor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_unflatten

from millrace.errors import AdapterError
from millrace.models.adapters.fitting import Shape
from millrace.models.adapters.folder import Factors
from millrace.models.adapters.tensors import Floats

_MOST_HALF = 65504.0
_INNER = ".inner"


class AdapterStacks:
    """The adapters that a model run by MLX has on its device."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._gathers = mx.default_device() != mx.cpu
        """MLX has a product that picks matrices by number, and on a CPU only a slow one."""
        self.slots: set[int] = set()
        self._wrapped: dict[str, AdaptedLinear] = {}
        self._tokens = _Rows()
        self._wanted = _Rows()

    @property
    def shapes(self) -> dict[str, Shape]:
        """Inputs and outputs of all modules that an adapter may change."""
        return {name: _shape(layer) for name, layer in self._layers()}

    def _layers(self) -> Iterator[tuple[str, Any]]:
        wrapped = {id(layer): layer.base for layer in self._wrapped.values()}
        inner = {id(base) for base in wrapped.values()}
        if not isinstance(self._model, nn.Module):
            return
        choosing = self._choosing()
        for name, layer in self._model.named_modules():
            if id(layer) in inner:
                continue
            layer = wrapped.get(id(layer), layer)
            if _is_linear(layer) or _own_shape(layer) is not None:
                outer = name.removesuffix(_INNER)
                yield outer if outer in choosing else name, layer

    def _choosing(self) -> dict[str, Any]:
        """The modules that run another one, `inner`, on chosen tokens alone, by the name of both."""
        return {n: m for n, m in self._model.named_modules() if hasattr(m, "choice")}

    @property
    def nbytes(self) -> int:
        return sum(layer.stacks.nbytes for layer in self._wrapped.values() if layer.stacks)

    def needs(self, slot: int, modules: Mapping[str, Factors]) -> int:
        """Bytes that all adapters will take with this one."""
        shapes, layers = self.shapes, dict(self._layers())
        total = 0
        for name in {*self._wrapped, *modules}:
            wrapped = self._wrapped.get(name)
            has = wrapped.stacks if wrapped is not None else None
            count, rank = (has.count, has.rank) if has is not None else (1, 0)
            if name in modules:
                count, rank = max(count, slot + 1), max(rank, modules[name].rank)
            total += count * rank * sum(shapes[name]) * int(_dtype(layers[name]).size)
        return total

    def place(self, slot: int, modules: Mapping[str, Factors]) -> None:
        """Put an adapter into a slot. Where that fails, nothing has changed."""
        layers = dict(self._layers())
        grown: dict[str, Stacks] = {}
        for name, factors in modules.items():
            wrapped = self._wrapped.get(name)
            before = wrapped.stacks if wrapped is not None else None
            grown[name] = _stacked(before, slot, factors, _dtype(layers[name]))
            mx.eval(grown[name].a, grown[name].b)
        fresh: list[tuple[str, AdaptedLinear]] = []
        choosing = self._choosing()
        for name, stacks in grown.items():
            if name not in self._wrapped:
                outer = choosing.get(name)
                choice = outer.choice if outer is not None else None
                self._wrapped[name] = AdaptedLinear(layers[name], self, choice)
                path = name if outer is None else name + _INNER
                fresh.append((path, self._wrapped[name]))
            self._wrapped[name].stacks = stacks
        if fresh:
            self._model.update_modules(tree_unflatten(fresh))
        self.slots.add(slot)

    def remove(self, slot: int) -> None:
        """Make a slot nothing again; stacks become smaller where the last one went."""
        self.slots.discard(slot)
        count = max(self.slots, default=0) + 1
        for layer in self._wrapped.values():
            if layer.stacks is None:
                continue
            if slot < layer.stacks.count:
                keep = mx.arange(min(count, layer.stacks.count))
                kept = (keep != slot)[:, None, None]
                a, b = (mx.where(kept, part[keep], 0) for part in (layer.stacks.a, layer.stacks.b))
                mx.eval(a, b)
                layer.stacks = Stacks(a, b) if count > 1 else None

    def use(self, rows: Sequence[int], wanted: Sequence[int] = ()) -> None:
        """The slots of the rows that are run next, and the places of those whose logits are wanted."""
        self._tokens = self._tokens.changed(rows)
        # One row has all tokens of the pass.
        chosen = rows if len(rows) == 1 else [rows[place] for place in wanted]
        self._wanted = self._wanted.changed(chosen)

    def added(self, x: mx.array, y: mx.array, stacks: Stacks, wanted: bool = False) -> mx.array:
        """A module's outputs and what the rows' adapters add to them; `wanted` says that it was run on the
        wanted tokens alone."""
        found = self._wanted if wanted else self._tokens
        rows, chosen = found.slots, found.index
        if not rows or not y.shape[-1]:
            return y
        if max(rows) >= stacks.count:
            # Of adapters that do not change this module, its stacks know nothing.
            rows = tuple(r if r < stacks.count else 0 for r in rows)
            if not any(rows):
                return y
            chosen = mx.array(rows, mx.uint32)
        assert chosen is not None
        a, b = stacks.a, stacks.b
        grouped = x.reshape(len(rows), -1, x.shape[-1]).astype(a.dtype)
        if len(set(rows)) == 1:
            high = (grouped @ a[rows[0]]) @ b[rows[0]]
        elif not self._gathers:
            high = _by_slot(grouped, a, b, rows)
        else:
            low = mx.gather_mm(grouped, a, rhs_indices=chosen)
            high = mx.gather_mm(low, b, rhs_indices=chosen)
        total: mx.array = y + high.reshape(y.shape).astype(y.dtype)
        return total


def _by_slot(x: mx.array, a: mx.array, b: mx.array, rows: Sequence[int]) -> mx.array:
    """What each row's adapter adds: one product of all rows of a slot."""
    slots = sorted(set(rows))
    parts, order = [], []
    for slot in slots:
        mine = [i for i, row in enumerate(rows) if row == slot]
        some = x[mx.array(mine, mx.uint32)]
        shape = (*some.shape[:-1], b.shape[-1])
        parts.append((some @ a[slot]) @ b[slot] if slot else mx.zeros(shape, x.dtype))
        order += mine
    back = np.argsort(order).astype(np.uint32)
    return mx.concatenate(parts)[mx.array(back)]


@dataclass(frozen=True)
class _Rows:
    """The slots of some rows; none where no row has an adapter."""

    slots: tuple[int, ...] = ()
    index: mx.array | None = None

    def changed(self, rows: Sequence[int]) -> _Rows:
        """Those of other rows; the same object if they are equal."""
        slots = tuple(rows) if any(rows) else ()
        if slots == self.slots:
            return self
        return _Rows(slots, mx.array(slots, mx.uint32) if slots else None)


@dataclass(frozen=True)
class Stacks:
    """A module's factors of all slots."""

    a: mx.array
    """(slots, inputs, rank)"""
    b: mx.array
    """(slots, rank, outputs)"""

    @property
    def count(self) -> int:
        return int(self.a.shape[0])

    @property
    def rank(self) -> int:
        return int(self.a.shape[2])

    @property
    def nbytes(self) -> int:
        return int(self.a.nbytes + self.b.nbytes)


_PARAMETERS = frozenset({"weight", "bias", "scales", "biases"})


class AdaptedLinear(nn.Module):  # type: ignore[misc]
    """In the place of a linear layer that adapters change, whose parameters a model may look at and set."""

    def __init__(self, base: nn.Module, owner: AdapterStacks, choice: Any = None) -> None:
        """`choice` says whether it is run on the wanted tokens alone, where that can be."""
        super().__init__()
        self.base = base
        self.stacks: Stacks | None = None
        self._owner = owner
        self._choice = choice

    def __getattr__(self, key: str) -> Any:
        return getattr(self.base, key) if key in _PARAMETERS else super().__getattr__(key)

    def __setattr__(self, key: str, value: Any) -> None:
        if key in _PARAMETERS:
            setattr(self.base, key, value)
        else:
            super().__setattr__(key, value)

    def __call__(self, x: mx.array) -> mx.array:
        y: mx.array = self.base(x)
        if self.stacks is None:
            return y
        wanted = self._choice is not None and self._choice.made
        return self._owner.added(x, y, self.stacks, wanted)


def _stacked(before: Stacks | None, slot: int, factors: Factors, dtype: mx.Dtype) -> Stacks:
    inputs, outputs, rank = factors.a.shape[0], factors.b.shape[1], factors.rank
    count = slot + 1
    if before is not None:
        count, rank = max(count, before.count), max(rank, before.rank)
    a, b = mx.zeros((count, inputs, rank), dtype), mx.zeros((count, rank, outputs), dtype)
    if before is not None:
        a[: before.count, :, : before.rank] = before.a
        b[: before.count, : before.rank] = before.b
    # What was in the slot may have had a higher rank.
    a[slot], b[slot] = 0, 0
    a[slot, :, : factors.rank] = _array(factors.a, dtype)
    b[slot, : factors.rank] = _array(factors.b, dtype)
    return Stacks(a, b)


def _array(values: Floats, dtype: mx.Dtype) -> mx.array:
    if dtype == mx.float16 and np.abs(values).max() > _MOST_HALF:
        raise AdapterError("The adapter's values are too large for this model's float16.")
    return mx.array(values).astype(dtype)


def _is_linear(layer: Any) -> bool:
    """Whether a layer is a plain product; linear layers of a model's own kind may return several arrays."""
    ours = type(layer).__module__.startswith(("mlx.", "millrace."))
    return ours and isinstance(layer, nn.Linear | nn.QuantizedLinear)


def _own_shape(layer: Any) -> Shape | None:
    """Of a layer that our own kernels run."""
    shape: Shape | None = getattr(layer, "adaptable", None)
    return shape


def _shape(layer: Any) -> Shape:
    if (own := _own_shape(layer)) is not None:
        return own
    outputs, inputs = layer["weight"].shape
    if isinstance(layer, nn.QuantizedLinear):
        inputs = layer["scales"].shape[1] * layer.group_size
    return int(inputs), int(outputs)


def _dtype(layer: Any) -> mx.Dtype:
    """What the layer computes in, as far as its own arrays tell."""
    if _own_shape(layer) is not None:
        return mx.float32
    dtype: mx.Dtype = layer["scales" if isinstance(layer, nn.QuantizedLinear) else "weight"].dtype
    return dtype if mx.issubdtype(dtype, mx.floating) else mx.bfloat16
