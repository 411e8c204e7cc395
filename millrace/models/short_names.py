"""Short names of models: what people type, and the Hugging Face repositories that it stands for.

The table is data, `short_names.json`. Every architecture in it is loaded in a tiny shape by
tests/models/test_short_names.py, so that nothing is recommended here that cannot be served. Sizes are those
of the repositories in autumn 2026. Names of files and folders on this machine come before these.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Sequence
from importlib import resources

import msgspec

AUTO = "auto"
"""Stands for the best model that fits this machine."""
_MOST_NAME = 100
"""Characters; what is longer is not compared with the table."""
_SUFFIX = re.compile(
    r"(?P<base>.+?)(?:-(?:instruct|it|chat))?(?:-latest)?(?:-mlx)?"
    r"(?:-(?:(?P<bits>[2-8])-?bit|q(?P<q>[2-8])(?:-[a-z0-9-]+)?))?"
)
"""Variants that a name may end with: Hugging Face's (-it-4bit) and Ollama's (:8b-instruct-q4_K_M)."""


class ShortName(msgspec.Struct, frozen=True, kw_only=True):
    """One model in one precision."""

    name: str
    title: str
    """What its makers call it."""
    source: str
    """Its repository on Hugging Face."""
    architecture: str
    """The model_type of its config.json."""
    bits: int
    bytes: int
    """Of its weight files."""
    uses: tuple[str, ...]
    """Of chat, code, tools, thinking, pictures, embeddings."""
    quality: int
    """Higher is better; a rough order among models that make text."""
    active_bytes: int
    """Weights that are read for each token; fewer than all in a mixture of experts."""

    @property
    def sees(self) -> bool:
        return "pictures" in self.uses

    @property
    def embeds(self) -> bool:
        return "embeddings" in self.uses


class _Build(msgspec.Struct, frozen=True):
    bits: int
    source: str
    bytes: int


class _Entry(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    title: str
    architecture: str
    uses: tuple[str, ...]
    quality: int
    builds: list[_Build]
    """The first is what the name alone stands for."""
    active_bytes: int = 0
    """Of the first build; 0 where all weights are read for each token."""
    aliases: list[str] = []

    def rows(self) -> list[ShortName]:
        return [self._row(build) for build in self.builds]

    def _row(self, build: _Build) -> ShortName:
        first = self.builds[0]
        return ShortName(
            name=self.name if build is first else f"{self.name}-{build.bits}bit",
            title=self.title,
            source=build.source,
            architecture=self.architecture,
            bits=build.bits,
            bytes=build.bytes,
            uses=self.uses,
            quality=self.quality,
            active_bytes=self.active_bytes * build.bytes // first.bytes or build.bytes,
        )


@functools.cache
def _entries() -> list[_Entry]:
    data = resources.files(__package__).joinpath("short_names.json").read_bytes()
    return msgspec.json.decode(data, type=list[_Entry])


@functools.cache
def all_names() -> tuple[ShortName, ...]:
    """Every model of the table in every precision."""
    return tuple(row for entry in _entries() for row in entry.rows())


@functools.cache
def _by_key() -> dict[str, list[ShortName]]:
    return {
        _key(name): entry.rows()
        for entry in _entries()
        for name in (entry.name, entry.title, *entry.aliases)
    }


@functools.cache
def _by_source() -> dict[str, ShortName]:
    return {row.source: row for row in all_names()}


@functools.cache
def _by_repository() -> dict[str, ShortName]:
    """By the name of a repository without its owner's."""
    return {_key(row.source.partition("/")[2]): row for row in all_names()}


def _dashed(name: str) -> str:
    return re.sub(r"[:_\s]+", "-", name.strip().lower())


def _key(name: str) -> str:
    """Names are the same however their parts are separated: gemma4:e4b is gemma-4-e4b."""
    return _dashed(name).replace("-", "")


def find(name: str) -> ShortName | None:
    """The model that a short name stands for, in the precision that it names or else the usual one."""
    if "/" in name or len(name) > _MOST_NAME:
        return None
    dashed = _dashed(name)
    if (rows := _by_key().get(_key(dashed))) is not None:
        return rows[0]
    if (row := _by_repository().get(_key(dashed))) is not None:
        return row
    match = _SUFFIX.fullmatch(dashed)
    if match is None or (rows := _by_key().get(_key(match["base"]))) is None:
        return None
    bits = match["bits"] or match["q"]
    return next((row for row in rows if bits is None or row.bits == int(bits)), None)


def of_source(source: str) -> ShortName | None:
    """The short name of a Hugging Face repository."""
    return _by_source().get(source)


def near(name: str, others: Sequence[str] = (), *, table: bool = True) -> list[str]:
    """Up to three names that a mistyped one may stand for, of `others` and the table; the best first."""
    if len(name) > _MOST_NAME or not name:
        return []
    known = {_key(row.name): row.name for row in all_names()} if table else {}
    for entry in _entries() if table else ():
        known |= {_key(alias): entry.name for alias in entry.aliases}
    known |= {_key(other.rpartition("/")[2]): other for other in others}
    wanted = _key(name.rpartition("/")[2])
    found = difflib.get_close_matches(wanted, known, n=6, cutoff=0.7)
    begun = sorted((k for k in known if len(wanted) > 2 and k.startswith(wanted)), key=len)
    return list(dict.fromkeys(known[key] for key in (*begun, *found)))[:3]


def meant(name: str, others: Sequence[str] = (), *, table: bool = True) -> str:
    """A question that names what a mistyped name may stand for; empty where nothing is near."""
    found = near(name, others, table=table)
    return f"Did you mean {' or '.join(found)}?" if found else ""
