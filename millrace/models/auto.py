"""The model that `auto` stands for: the best one that fits this machine and can be had.

It is fetched where a hub answers. Without one, the best model that is here already takes its place, or else
the small built-in one.
"""

from __future__ import annotations

import os
import shutil
import threading
import urllib.error
import urllib.request
from http.client import HTTPException
from pathlib import Path
from typing import Literal

import msgspec

from millrace.errors import MillraceError
from millrace.models import store, suggestions
from millrace.models.footprint import device_budget
from millrace.models.short_names import ShortName
from millrace.sizes import format_bytes

Answer = Literal["yes", "no", "silence"]
"""Whether a hub has a model: yes, no, or it does not answer."""
PATIENCE = 2.0
"""Seconds that a hub has to answer in."""
_HAS_NONE = (401, 403, 404, 410, 451)
"""The statuses by which a hub says that it does not have a model for this user."""
_MOST_ASKED = 5
_SPARE_DISK = 1 << 30


class ChosenModel(msgspec.Struct, frozen=True):
    name: str | None
    """None is the built-in model."""
    reason: str
    """Why this one, in a sentence or two for the user."""


def choose(memory: int | None = None, *, download: bool = True) -> ChosenModel:
    """The best model for `memory` bytes, or for what this device has."""
    memory = memory or device_budget()
    able = suggestions.choices(memory)
    if not able:
        room = "an unknown memory" if memory is None else format_bytes(memory)
        return _instead(memory, f"No model with a short name fits into {room}")
    best = able[0]
    chosen = f"is the best model that fits into {format_bytes(memory or 0)}"
    answer: Answer = "silence"
    for model in able[:_MOST_ASKED]:
        if store.is_whole_in_hub(model.source):
            return ChosenModel(model.name, f"{model.name} {chosen}, of those that can be had.")
        if not download or not _has_disk(model):
            continue
        answer = ask(model)
        if answer == "yes":
            return ChosenModel(
                model.name, f"{model.name} {chosen}: {format_bytes(model.bytes)} to fetch."
            )
        if answer == "silence":
            break
    why = f"{endpoint()} does not answer" if download else "Nothing is fetched"
    if answer == "no":
        why = f"{endpoint()} has none of the best models that fit"
    if download and not _has_disk(best):
        why = f"The disk has no room for {best.name} ({format_bytes(best.bytes)})"
    local = next((m for m in able if store.is_whole_in_hub(m.source)), None)
    if local is not None:
        return ChosenModel(local.name, f"{why}; {local.name} is the best model here that fits.")
    return _instead(memory, why)


def _instead(memory: int | None, why: str) -> ChosenModel:
    found = _best_local(memory)
    if found is not None:
        return ChosenModel(found, f"{why}; {found} is the largest model here that fits.")
    return ChosenModel(
        None, f"{why}; the small built-in model is taken instead, which is for trying things out."
    )


def _best_local(memory: int | None) -> str | None:
    """The largest model on this machine that makes text and fits, the built-in one aside."""
    from millrace.models.encoders import encoder_of
    from millrace.models.footprint import footprint
    from millrace.models.supported import is_supported

    for model in sorted(store.local_models(), key=lambda m: -m.bytes):
        folder = Path(model.path)
        if model.error is not None or model.source == "default":
            continue
        try:
            if encoder_of(folder, name=model.name) is not None or is_supported(folder) is False:
                continue
            held = footprint(folder)
        except MillraceError:
            continue
        if memory is None or held.fixed + held.least_kv <= memory:
            return model.name
    return None


def _has_disk(model: ShortName) -> bool:
    place = store.places()[1]
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        return shutil.disk_usage(place).free >= model.bytes + _SPARE_DISK
    except OSError:
        return True


def endpoint() -> str:
    """The hub that models are fetched from."""
    return (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")


def is_offline() -> bool:
    """Whether the user wants no hub to be asked."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def ask(model: ShortName, patience: float = PATIENCE) -> Answer:
    """Ask the hub for a model; whatever takes longer than `patience` is no answer."""
    if is_offline():
        return "silence"
    answers: list[Answer] = []

    def request() -> None:
        address = f"{endpoint()}/api/models/{model.source}"
        try:
            with urllib.request.urlopen(
                urllib.request.Request(address, method="HEAD"), timeout=patience
            ) as found:
                # A network that asks for a sign-in first answers everything with its own page.
                kind = found.headers.get_content_subtype()
                answers.append("yes" if kind == "json" else "silence")
        except urllib.error.HTTPError as error:
            answers.append("no" if error.code in _HAS_NONE else "silence")
        except (OSError, ValueError, HTTPException):
            answers.append("silence")

    # Looking up a name has no timeout of its own: the thread is left behind.
    thread = threading.Thread(target=request, name="ask-hub", daemon=True)
    thread.start()
    thread.join(patience)
    return answers[0] if answers else "silence"
