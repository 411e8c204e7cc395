"""What a server that runs on the small built-in model says of better ones.

The hub is asked beside everything else and has two seconds: no start waits for it. Once it has answered,
that is noted in millrace's own folder and later starts do not ask again.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

from millrace.config import home

if TYPE_CHECKING:
    from millrace.models.short_names import ShortName
    from millrace.serving.catalogue import ModelSpec

_NOTE = "hub-answered"
"""A file whose presence says that a hub has answered before."""


def is_builtin(specs: list[ModelSpec]) -> bool:
    """Whether these are the small built-in model alone."""
    from millrace.models import store
    from millrace.models.resolve import DEFAULT

    return [spec.folder for spec in specs] == [store.models_home() / DEFAULT]


class BetterModel:
    """The model that is recommended in place of the built-in one, shown once it is known to be had."""

    def __init__(self, memory: int | None, command: str) -> None:
        from millrace.models.suggestions import recommended

        self._command = command
        self._model = recommended(memory)
        self._lock = threading.Lock()
        self._shown = self._reachable = False
        if self._model is not None:
            # Not one that the process waits for at its end.
            threading.Thread(target=self._ask, name="better-model", daemon=True).start()

    def show(self) -> None:
        """Print what is known now; what becomes known later is printed then."""
        with self._lock:
            self._shown = True
            _print("smollm2 is the small built-in model, for trying things out.")
            if self._reachable:
                self._print_model()
            elif self._model is not None:
                _print(f"With a network, {self._command} serve auto fetches a better one.")

    def _ask(self) -> None:
        assert self._model is not None
        reachable = _is_reachable(self._model)
        with self._lock:
            self._reachable = reachable
            if reachable and self._shown:
                self._print_model()

    def _print_model(self) -> None:
        from millrace.sizes import format_bytes

        assert self._model is not None
        name, size = self._model.name, format_bytes(self._model.bytes)
        _print(f"The best model for this machine is {name} ({size}): {self._command} serve {name}")


def _is_reachable(model: ShortName) -> bool:
    """Whether it is here, or a hub has it, or one has answered before."""
    from millrace.models import auto, store

    note = home() / _NOTE
    if store.is_whole_in_hub(model.source):
        return True
    if auto.is_offline():
        return False
    if note.exists():
        return True
    if auto.ask(model) != "yes":
        return False
    with contextlib.suppress(OSError):
        note.touch()
    return True


def _print(text: str) -> None:
    from rich.console import Console

    Console(highlight=False).print(f"  {text}", markup=False, soft_wrap=True)
