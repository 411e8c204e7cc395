"""What the engine asks of a model's adapters, whether MLX runs the model or kernels of our own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from millrace.models.adapters.fitting import Shape
from millrace.models.adapters.folder import Factors
from millrace.models.adapters.stacks import AdapterStacks


class AdapterSlots(Protocol):
    slots: set[int]
    """Those that hold an adapter; slot 0 never does."""

    @property
    def shapes(self) -> Mapping[str, Shape]:
        """Inputs and outputs of all modules that an adapter may change."""

    @property
    def nbytes(self) -> int: ...

    def needs(self, slot: int, modules: Mapping[str, Factors]) -> int:
        """Bytes that all adapters will take once this one has the slot."""

    def place(self, slot: int, modules: Mapping[str, Factors]) -> None:
        """Put an adapter into a slot. Where that fails, nothing has changed."""

    def remove(self, slot: int) -> None: ...

    def use(self, rows: Sequence[int], wanted: Sequence[int] = ()) -> None:
        """The slots of the rows that are run next, and the places of those whose logits are wanted."""


def slots_of(model: Any) -> AdapterSlots:
    own: AdapterSlots | None = getattr(model, "adapters", None)
    return own if own is not None else AdapterStacks(model)
