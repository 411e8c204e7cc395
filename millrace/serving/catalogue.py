"""The models that this server can be asked for: those it was told of, and those found on this machine.

It knows names, folders and settings, and reads files; it knows nothing of what is loaded.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from millrace.config import EngineConfig, LimitSettings
from millrace.errors import ModelError, SetupError
from millrace.models import short_names, store
from millrace.models.description import missing_file
from millrace.models.window import is_candidate

_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,127}(/[A-Za-z0-9][\w.-]{0,127})?", re.ASCII)
"""Names that are looked for on this machine; a path of a caller's own is none."""

_FRESH = 10.0
"""Seconds for which a look around holds, unless something was added or taken away."""


@dataclass(frozen=True)
class ModelSpec:
    """A model that can be loaded, and what is set for it."""

    engine: EngineConfig
    aliases: tuple[str, ...] = ()
    defaults: dict[str, float] = field(default_factory=dict)
    """Sampling where a request says nothing, by the names of its fields."""
    template_arguments: dict[str, Any] = field(default_factory=dict)
    """What the template gets where a request does not say otherwise."""
    pin: bool = False
    """It never leaves to make room, nor for being unused."""
    ttl: float | None = None
    """Seconds without use after which it is unloaded; None stays."""
    named: bool = False
    """Told of at the start, not found."""
    limits: LimitSettings = field(default_factory=LimitSettings)
    """What all its callers together are held to."""
    max_queue: int | None = None
    """Answers that may wait for a place in its batch; None takes the server's number."""

    @property
    def name(self) -> str:
        return self.engine.name

    @property
    def folder(self) -> Path:
        return Path(self.engine.model)

    @property
    def profile(self) -> dict[str, Any]:
        """What was set for it in words that users know; empty where nothing was."""
        chosen: dict[str, Any] = dict(self.defaults)
        if self.template_arguments:
            chosen["template_arguments"] = self.template_arguments
        for name in ("context", "pooling", "tool_format", "reasoning_format"):
            if (value := getattr(self.engine, name)) is not None:
                chosen[name] = value
        chosen |= self.limits.given
        if self.max_queue is not None:
            chosen["max_queue"] = self.max_queue
        if (sparse := self.engine.specprefill) is not None:
            chosen["specprefill_draft"] = Path(sparse.draft).name
        if self.engine.weights != "auto":
            chosen["weights"] = self.engine.weights
        return chosen


class Catalogue:
    def __init__(
        self,
        specs: Sequence[ModelSpec],
        found: ModelSpec | None = None,
        folders: Iterable[Path] = (),
    ) -> None:
        """`found` is what holds for models that are found; without it, none are looked for."""
        self._specs = {s.name: s for s in specs}
        self._found = found
        self._folders = tuple(folders)
        self._seen: tuple[tuple[float, ...], float, list[ModelSpec]] | None = None
        self._names: dict[str, str] = {}
        for spec in specs:
            for name in (spec.name, *spec.aliases):
                if self._names.setdefault(name, spec.name) != spec.name:
                    raise SetupError(
                        f"Two models are called '{name}': '{self._names[name]}' and '{spec.name}'."
                    )
        if len(self._specs) != len(specs):
            names = [s.name for s in specs]
            twice = next(n for n in names if names.count(n) > 1)
            raise SetupError(f"Two models are called '{twice}'; give one of them another name.")
        for spec in specs:
            self._names.setdefault(spec.engine.model, spec.name)

    @property
    def named(self) -> list[ModelSpec]:
        return list(self._specs.values())

    @property
    def is_open(self) -> bool:
        """Whether models that lie on this machine are served too."""
        return self._found is not None

    def known(self, name: str) -> ModelSpec | None:
        """One that the server was told of, by any of its names."""
        return self._specs.get(self._names.get(name, ""))

    def search(self, name: str) -> ModelSpec | None:
        """One that lies on this machine, broken or not. Reads the disk: not for the event loop."""
        if (found := self._search(name)) is not None:
            return found
        short = short_names.find(name)
        return None if short is None else self.known(short.source) or self._search(short.source)

    def _search(self, name: str) -> ModelSpec | None:
        if self._found is None or not _NAME.fullmatch(name):
            return None
        folder = self._in_folders(name) or store.own_folder(name)
        if folder is None and "/" in name:
            folder = store.hub_folder(name)
            if folder is not None and _is_partial(folder):
                return None
        if folder is None:
            return None
        if folder.name != name and folder.parent == store.models_home():
            name = folder.name  # asked for by the name of the file it was made of
        return next((s for s in self.named if _same(s.folder, folder)), None) or self._spec(
            name, folder
        )

    def listed(self) -> list[ModelSpec]:
        """All that can be asked for. Reads the disk: not for the event loop."""
        if self._found is None:
            return self.named
        changed = tuple(_changed(f) for f in (*self._folders, *store.places()))
        now = time.monotonic()
        if self._seen is None or self._seen[0] != changed or now > self._seen[1] + _FRESH:
            self._seen = changed, now, self._look()
        return self._seen[2]

    def _look(self) -> list[ModelSpec]:
        specs = dict(self._specs)
        served = [s.folder for s in specs.values()]
        own = [(f.name, f) for folder in self._folders for f in _inside(folder)]
        for name, folder in own + [(m.name, Path(m.path)) for m in store.local_models()]:
            is_served = any(_same(folder, other) for other in served)
            if name not in self._names and not is_served and _NAME.fullmatch(name):
                specs.setdefault(name, self._spec(name, folder))
        return list(specs.values())

    def _spec(self, name: str, folder: Path) -> ModelSpec:
        assert self._found is not None
        engine = msgspec.structs.replace(self._found.engine, model=str(folder), name=name)
        return replace(self._found, engine=engine)

    def _in_folders(self, name: str) -> Path | None:
        found = (folder / name for folder in self._folders if "/" not in name)
        return next((f for f in found if is_candidate(f)), None)


def _changed(folder: Path) -> float:
    try:
        return os.stat(folder).st_mtime
    except OSError:
        return 0.0


def _inside(folder: Path) -> list[Path]:
    """The model folders in a folder, broken ones too."""
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return []
    return [folder / n for n in names if not n.startswith(".") and is_candidate(folder / n)]


def _is_partial(folder: Path) -> bool:
    """Whether only some of a model's files were fetched."""
    try:
        return missing_file(folder) is not None
    except ModelError:
        return False


def _same(one: Path, other: Path) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:
        return False
