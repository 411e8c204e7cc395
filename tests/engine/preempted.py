"""A bench that sees which rows gave way: those whose prompt is run again after they had answered."""

from __future__ import annotations

from typing import Any

from engine.harness import Bench

from millrace.protocol import FromEngine, Prefilled, Step


class Witness(Bench):
    def __init__(self, *args: Any, **more: Any) -> None:
        self.again: dict[int, Prefilled] = {}
        """By request, how far its prompt was when it had last begun anew."""
        super().__init__(*args, **more)

    def _deliver(self, message: FromEngine) -> None:
        if isinstance(message, Step):
            begun = {id for id, _ in self.generated}
            self.again |= {part.id: part for part in message.prefilled if part.id in begun}
        super()._deliver(message)
