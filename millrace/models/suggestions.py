"""Which models of the table of short names fit into a given memory, and which of them is the best choice.

What a model takes is estimated by the rule of `millrace.models.footprint`, from the size of its weights in
place of its files: nothing has been fetched yet.
"""

from __future__ import annotations

import msgspec

from millrace.models import blas, short_names
from millrace.models.footprint import Footprint, estimate
from millrace.models.short_names import ShortName
from millrace.sizes import format_bytes

_STATE = 10**9
"""Bytes of key-value memory with which a model is of use: some ten thousand tokens."""
_READ_PER_TOKEN = {"cpu": 3 * 10**9, "metal": 8 * 10**9, "cuda": 40 * 10**9}
"""Weights that are read for each token, at most, in what is chosen unasked: memory is read at some 20, 100
and 1,000 GB a second, and an answer should come at the speed of reading at least."""


class Fit(msgspec.Struct, frozen=True):
    """Whether a model fits, and why."""

    need: int
    fits: bool
    reason: str


def need(model: ShortName) -> int:
    """Bytes that it takes while it is served, about: weights as the back-end holds them, and state."""
    return _with_state(_held(model))


def _with_state(held: Footprint) -> int:
    return held.fixed + max(held.least_kv, _STATE)


def _held(model: ShortName) -> Footprint:
    return estimate(
        model.bytes,
        model.bits,
        model.architecture,
        sees=model.sees,
        encodes=model.embeds,
        experts=model.active_bytes < model.bytes,
    )


def fit(model: ShortName, memory: int | None) -> Fit:
    """Whether it fits into what models may use; where that is unknown, it is taken to fit."""
    held = _held(model)
    needed = _with_state(held)
    about = f"Needs about {format_bytes(needed)}"
    if held.weights > 2 * model.bytes:
        about += " (this back-end widens its weights)"
    if memory is None:
        return Fit(needed, True, f"{about}; the memory of this device is unknown.")
    room = f"{format_bytes(memory)} that models may use here"
    if needed <= memory:
        return Fit(needed, True, f"{about} of the {room}.")
    return Fit(needed, False, f"{about}, more than the {room}.")


def fitting(memory: int) -> list[ShortName]:
    """Those that fit, the best first."""
    found = [m for m in short_names.all_names() if need(m) <= memory]
    return sorted(found, key=lambda m: (-m.quality, -m.bytes))


def choices(memory: int | None, uses: frozenset[str] = frozenset({"chat"})) -> list[ShortName]:
    """What may be chosen unasked for one of these uses, the best first: it fits and answers quickly."""
    if memory is None:
        return []
    most = _READ_PER_TOKEN.get(blas.mlx_backend() or "cpu", _READ_PER_TOKEN["cpu"])
    able = [m for m in fitting(memory) if uses & set(m.uses) and m.bits <= 4]
    return [m for m in able if m.active_bytes * _held(m).weights <= most * m.bytes]


def recommended(memory: int | None) -> ShortName | None:
    """The best model to talk to that fits."""
    return next(iter(choices(memory)), None)
