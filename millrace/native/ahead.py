"""Compiling a model's kernels while its weights are packed, each set in a process of its own.

LLVM runs on one thread of a process at a time. What a process leaves on disk is then loaded here; a set
that no process could compile is compiled here. When a model is loaded, all of its kernels are.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict

import msgspec

from millrace.native import library
from millrace.native.compile import is_compiled, processor
from millrace.native.formats import Format

log = logging.getLogger("millrace.native")

_POLL = 0.02
_MODULE = "millrace.native.ahead"
_Form = Format | None
"""A format, whose kernels are one set; None stands for those that all formats share."""
DEFAULT: tuple[_Form, ...] = (
    None,
    Format("u4", 32, "f16", biased=True),
    Format("u8", 32, "f16", zero=128),
)
"""The sets of the default model."""
USUAL = (
    *DEFAULT,
    Format("u4", 64, "bf16", biased=True),
    Format("u8", 64, "bf16", biased=True),
)
"""What set-up compiles: besides, those of models that are often served."""


class _Process:
    """A set that a process compiles."""

    def __init__(self, form: _Form) -> None:
        self.name = library.name_of(form)
        self._process: subprocess.Popen[bytes] | None = None
        log.info("compiling kernels for this processor (%s): %s", processor()[0], self.name)
        given = msgspec.json.encode(asdict(form) if form else None).decode()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", _MODULE, given],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        except OSError as error:
            log.debug("no process compiles %s: %s", self.name, error)

    @property
    def runs(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def failed(self) -> bool:
        return self._process is None or self._process.returncode != 0


_early: dict[_Form, _Process] = {}


def begin_early() -> None:
    """Start on the set that every model needs, before the model is known."""
    if None not in _early and not is_compiled(library.name_of(None)):
        _early[None] = _Process(None)


class KernelCompiler:
    """The sets of kernels that a model needs, and the processes that compile those that are missing."""

    def __init__(self, processes: int) -> None:
        self._most = max(1, processes)
        self._begun = time.monotonic()
        self._wanted: dict[_Form, None] = {}
        self._queue: list[_Form] = []
        self._started: list[_Process] = []

    def want(self, form: _Form) -> None:
        """Have a set compiled, with the one that all share; returns at once."""
        if form is not None:
            self.want(None)
        if form not in self._wanted:
            self._wanted[form] = None
            if (early := _early.pop(form, None)) is not None:
                self._started.append(early)
            elif not is_compiled(library.name_of(form)):
                self._queue.append(form)
        self._advance()

    def finish(self, note: Callable[[float], None] = lambda share: None) -> None:
        """Wait until all are compiled, and load them; `note` gets the part that is done, from 0 to 1."""
        while left := self._advance():
            note(1 - left / (len(self._started) + len(self._queue)))
            time.sleep(_POLL)
        if failed := [process.name for process in self._started if process.failed]:
            log.warning("kernels are compiled one by one, since processes failed: %s", failed)
        for form in self._wanted:
            library.load(form)
        if self._started:
            seconds = time.monotonic() - self._begun
            log.info("compiled %d sets of kernels in %.1f s", len(self._started), seconds)

    def _advance(self) -> int:
        """Start what may start; returns how many sets are not compiled yet."""
        running = sum(process.runs for process in self._started)
        while self._queue and running < self._most:
            self._started.append(_Process(self._queue.pop(0)))
            running += self._started[-1].runs
        return running + len(self._queue)


def set_up(forms: Sequence[_Form]) -> None:
    """Compile sets before a model is loaded that needs them."""
    kernels = KernelCompiler(os.cpu_count() or 1)
    for form in forms:
        kernels.want(form)
    kernels.finish()


if __name__ == "__main__":
    match sys.argv[1:]:
        case []:
            logging.basicConfig(level=logging.INFO, format="%(message)s")
            set_up(USUAL)
        case ["default"]:
            set_up(DEFAULT)
        case [form]:
            library.build(msgspec.json.decode(form, type=_Form))
