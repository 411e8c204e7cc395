"""From what the command line says of models to what the server can load."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from millrace.cli.settings import ModelTable
from millrace.cli.values import adapter_in, bytes_of
from millrace.config import MOST_NAME, ServeConfig
from millrace.durations import seconds_of
from millrace.errors import MillraceError, SetupError
from millrace.models.encoders.facts import pooling_called
from millrace.models.fetch import Progress
from millrace.models.resolve import resolve
from millrace.serving.catalogue import Catalogue, ModelSpec
from millrace.serving.drafts import specprefill_of, with_draft
from millrace.serving.listener import bind
from millrace.serving.model_launcher import check_defaults
from millrace.text.conversation import Conversation
from millrace.text.formats import by_name, thought_by_name

log = logging.getLogger("millrace.models")

_FOUND_STAY = 1800.0
"""Seconds that a model which nobody named stays after its last use."""
_NAMED = re.compile(r"([A-Za-z0-9][\w.:/-]{0,127})=(.+)", re.ASCII)


@dataclass(frozen=True)
class Named:
    """The models that the server was told of."""

    specs: list[ModelSpec]
    first: list[ModelSpec]
    """Those of them that are loaded at the start."""


def catalogue_of(
    config: ServeConfig,
    models: Sequence[str],
    tables: Mapping[str, ModelTable],
    progress: Progress,
    *,
    name: str | None,
    aliases: Sequence[str],
    pins: Sequence[str],
    ttl: str | None,
    only: bool,
    folders: Sequence[str],
) -> tuple[Catalogue, list[ModelSpec]]:
    """All that can be asked for, and what of it is loaded at the start."""
    stays = time_of("--ttl", ttl)
    # What can be wrong is told before anything is downloaded.
    bind(config.host, config.port).close()
    _check_formats(config.engine.tool_format, config.engine.reasoning_format, config.engine.pooling)
    for key, table in tables.items():
        with _told_of(key):
            _check_formats(table.tool_format, table.reasoning_format, table.pooling)
    base = ModelSpec(engine=config.engine, defaults=config.defaults, ttl=stays, named=True)
    served = specs_of(
        models, tables, base, progress, name=name, aliases=aliases, pins=pins, memory=config.memory
    )
    found = ModelSpec(
        engine=msgspec.structs.replace(config.engine, adapters=(), specprefill=None),
        defaults=config.defaults,
        ttl=_FOUND_STAY if ttl is None else stays,
    )
    catalogue = Catalogue(served.specs, None if only else found, check_folders(folders))
    return catalogue, served.first


def specs_of(
    models: Sequence[str],
    tables: Mapping[str, ModelTable],
    base: ModelSpec,
    progress: Progress,
    *,
    name: str | None,
    aliases: Sequence[str],
    pins: Sequence[str],
    memory: int | None = None,
) -> Named:
    """The models of the command line and of the file; the default one where there are none."""
    specs = {key: _from_table(key, table, base, progress) for key, table in tables.items()}
    first = [key for key, table in tables.items() if table.preload]
    given: list[tuple[str | None, str | None]] = [_split(m) for m in models]
    if not given and not specs:
        given = [(None, None)]
    if (name or aliases) and len(given) != 1:
        raise SetupError(
            "--name and --alias are for a single model; write several as NAME=MODEL, or in a "
            "configuration file."
        )
    lora, sparse = base.engine.adapters, base.engine.specprefill
    if sparse is not None and len(given) != 1:
        raise SetupError(
            "--specprefill-draft is for a single model; give those of several in a configuration file."
        )
    base = replace(base, engine=with_draft(base.engine, progress))
    if lora and len(given) != 1:
        raise SetupError(
            "--lora is for a single model; give those of several in a configuration file."
        )
    for own, model in given:
        if own is None and name is None and model in specs:
            key = model
            engine = specs[key].engine
            sparse = base.engine.specprefill or engine.specprefill
            engine = msgspec.structs.replace(
                engine, adapters=(*engine.adapters, *lora), specprefill=sparse
            )
            aliases_ = (*specs[key].aliases, *aliases)
            specs[key] = replace(specs[key], engine=engine, aliases=aliases_)
        else:
            found = resolve(model, progress=progress, memory=memory)
            if found.note:
                log.info("%s", found.note)
            key = name or own or found.name
            if key in specs:
                raise SetupError(f"Two models are called '{key}'; give one of them another name.")
            engine = msgspec.structs.replace(base.engine, model=str(found.path), name=key)
            specs[key] = replace(base, engine=engine, aliases=(*aliases, *found.aliases))
        first.append(key)
    whole = {s.name: _sound(s) for s in pinned(list(specs.values()), pins)}
    return Named(list(whole.values()), [whole[key] for key in dict.fromkeys(first)])


def _from_table(key: str, table: ModelTable, base: ModelSpec, progress: Progress) -> ModelSpec:
    where = f"[models.{key}]"
    if not table.model:
        raise SetupError(f"{where} model is empty; name a folder, a file or a model.")
    found = resolve(str(Path(table.model).expanduser()), progress=progress)
    changes: dict[str, Any] = {"model": str(found.path), "name": key}
    changes["specprefill"] = specprefill_of(
        table.specprefill_draft,
        table.specprefill,
        table.specprefill_threshold,
        table.specprefill_keep_pct,
        f"{where} ",
    )
    changes["adapters"] = tuple(adapter_in(n, path) for n, path in table.lora.items())
    for field in (
        "weights",
        "context",
        "max_running",
        "task",
        "pooling",
        "tool_format",
        "reasoning_format",
    ):
        if (value := getattr(table, field)) is not None:
            changes[field] = value
    for field in ("kv_memory", "cache_memory"):
        if (size := getattr(table, field)) is not None:
            changes[field] = bytes_of(f"{where} {field}", str(size))
    check_defaults(table.defaults, where)
    ttl = base.ttl if table.ttl is None else time_of(f"{where} ttl", str(table.ttl))
    return replace(
        base,
        engine=with_draft(msgspec.structs.replace(base.engine, **changes), progress),
        aliases=tuple(table.aliases),
        defaults=base.defaults | table.defaults,
        template_arguments=table.template_arguments,
        limits=table.limits("max_running"),
        max_queue=table.max_queue,
        pin=table.pin,
        ttl=ttl,
    )


def _sound(spec: ModelSpec) -> ModelSpec:
    """With each alias once; raises what would be found wrong only when the model is asked for."""
    for name in (spec.name, *spec.aliases):
        if not name or not name.isprintable() or len(name) > MOST_NAME:
            raise SetupError(f"'{name[:MOST_NAME]}' is no name for a model.")
    engine = spec.engine
    with _told_of(spec.name):
        _check_formats(engine.tool_format, engine.reasoning_format, engine.pooling)
        Conversation(messages=[], template_arguments=spec.template_arguments)
    aliases = tuple(a for a in dict.fromkeys(spec.aliases) if a != spec.name)
    return replace(spec, aliases=aliases)


def _check_formats(tool: str | None, reasoning: str | None, pooling: str | None) -> None:
    if tool is not None:
        by_name(tool)
    if reasoning is not None:
        thought_by_name(reasoning)
    if pooling is not None:
        pooling_called(pooling)


@contextmanager
def _told_of(name: str) -> Iterator[None]:
    """What is wrong is told with the model that it is wrong of."""
    try:
        yield
    except MillraceError as error:
        raise SetupError(f"The model '{name}': {error.message}") from error


def pinned(specs: Sequence[ModelSpec], pins: Sequence[str]) -> list[ModelSpec]:
    names = {n for s in specs for n in (s.name, *s.aliases)}
    for pin in pins:
        if pin not in names:
            raise SetupError(f"--pin {pin}: the models named here are {', '.join(sorted(names))}.")
    return [replace(s, pin=s.pin or any(n in pins for n in (s.name, *s.aliases))) for s in specs]


def _split(model: str) -> tuple[str | None, str | None]:
    """NAME=MODEL, unless there is a file or a folder of just that name."""
    match = None if os.path.exists(Path(model).expanduser()) else _NAMED.fullmatch(model)
    return (match[1], match[2]) if match else (None, model)


def media_folders(given: Sequence[str]) -> tuple[str, ...]:
    """Folders whose pictures requests may name."""
    return tuple(str(f.absolute()) for f in check_folders(given, "--allow-local-media"))


def check_folders(folders: Sequence[str], option: str = "--model-dir") -> list[Path]:
    found = [Path(folder).expanduser() for folder in folders]
    for folder in found:
        if not folder.is_dir():
            raise SetupError(f"{option} {folder} is not a folder.")
    return found


def time_of(option: str, text: str | None) -> float | None:
    """Seconds; None where nobody says, and for ever."""
    if text is None:
        return None
    try:
        seconds = seconds_of(text)
    except ValueError as error:
        raise SetupError(f"{option} {error}.") from None
    return None if seconds < 0 else seconds
