"""The configuration file, `millrace.toml`: options of `serve` under their names, and tables of models.

What the command line says comes before the environment (MILLRACE_PORT for --port), and that before the
file. A key that nobody knows is an error which names the nearest one.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, get_args

import msgspec
import typer

from millrace.config import Task, Weights, home
from millrace.errors import SetupError

FILE = "millrace.toml"
_MODELS = "millrace.models"


class ModelTable(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What a table [models.NAME] may say."""

    model: str
    """A folder, a GGUF file, a Hugging Face id or a local name."""
    aliases: list[str] = []
    preload: bool = False
    """Load it at the start."""
    pin: bool = False
    ttl: str | float | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    max_tokens: int | None = None
    template_arguments: dict[str, Any] = {}
    tool_format: str | None = None
    reasoning_format: str | None = None
    task: Task | None = None
    """embed or rerank, for a decoder that is used as an encoder."""
    pooling: str | None = None
    context: int | None = None
    weights: Weights | None = None
    lora: dict[str, str] = {}
    """Folders of adapters by their names."""
    specprefill_draft: str | None = None
    """A smaller model of the same vocabulary, for SpecPrefill."""
    specprefill: bool | None = None
    specprefill_threshold: int | None = None
    specprefill_keep_pct: float | None = None
    kv_memory: str | int | None = None
    cache_memory: str | int | None = None

    @property
    def said(self) -> dict[str, Any]:
        """All that the table sets."""
        fresh = ModelTable(model=self.model)
        found = {name: getattr(self, name) for name in self.__struct_fields__}
        return {name: v for name, v in found.items() if v != getattr(fresh, name)}

    @property
    def defaults(self) -> dict[str, float]:
        found = {name: getattr(self, name) for name in SAMPLING}
        return {name: value for name, value in found.items() if value is not None}


SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "max_tokens",
)


def use_file(context: typer.Context, chosen: str | None) -> str | None:
    """Read the file and have its options stand behind those of the command line."""
    file = _file(chosen)
    if file is None:
        return None
    known = {p.name or "": p for p in context.command.params}
    options, tables = read(file, known)
    for name, value in options.items():
        flag = bool(getattr(known[name], "is_flag", False))
        repeatable = bool(getattr(known[name], "multiple", False))
        values = value if repeatable and isinstance(value, list) else [value]
        if any(isinstance(v, list) or isinstance(v, bool) != flag for v in values):
            kind = "true or false" if flag else "a text or a number"
            raise SetupError(f"{file}: '{name}' is {kind}, not {_spelt(value)}.")
        if repeatable:
            options[name] = values
    context.default_map = {**(context.default_map or {}), **options}
    context.meta[_MODELS] = tables
    return str(file)


def _spelt(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def tables_of(context: typer.Context) -> dict[str, ModelTable]:
    found: dict[str, ModelTable] = context.meta.get(_MODELS, {})
    return found


def profile_of(name: str) -> ModelTable | None:
    """What the configuration that a server would find here says of a model."""
    if (file := _file(os.environ.get("MILLRACE_CONFIG"))) is None:
        return None
    tables = read(file)[1]
    return next((t for n, t in tables.items() if name in (n, *t.aliases)), None)


def _file(chosen: str | None) -> Path | None:
    """The one that was named, else one in the current folder, else one in millrace's own."""
    if chosen is not None:
        return Path(chosen).expanduser()
    places = (Path(FILE), home() / FILE)
    return next((p for p in places if os.path.isfile(p)), None)


def read(
    file: Path, options: Iterable[str] | None = None
) -> tuple[dict[str, Any], dict[str, ModelTable]]:
    """The file's options by their names, and its models by theirs; `options` are those there are."""
    import tomllib

    try:
        raw = tomllib.loads(file.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise SetupError(f"The configuration {file} cannot be read: {reason}.") from error
    except tomllib.TOMLDecodeError as error:
        raise SetupError(f"{file} is not valid TOML: {error}.") from error
    tables = raw.pop("models", {})
    if not isinstance(tables, dict) or not all(isinstance(t, dict) for t in tables.values()):
        raise SetupError(f"{file}: models are written as tables, [models.NAME].")
    if options is None:
        options = [key.replace("-", "_") for key in raw]
    known = [n for n in options if n not in ("config_", "model", "help", "context_")]
    given = _checked(file, raw, known, "")
    for key, value in given.items():
        if isinstance(value, dict):
            raise SetupError(f"{file}: '{key}' is an option and takes no table.")
    return given, {name: _table(file, name, table) for name, table in tables.items()}


def _table(file: Path, name: str, raw: Mapping[str, Any]) -> ModelTable:
    where = f" in [models.{name}]"
    fields = ModelTable.__struct_fields__
    try:
        found = msgspec.convert(_checked(file, raw, fields, where), ModelTable)
    except msgspec.ValidationError as error:
        raise SetupError(f"{file}{where}: {error}.") from error
    if found.weights is not None and found.weights not in get_args(Weights):
        raise SetupError(f"{file}{where}: weights must be one of {', '.join(get_args(Weights))}.")
    return found


def _checked(
    file: Path, raw: Mapping[str, Any], known: Iterable[str], where: str
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in raw.items():
        name = _check(file, key, known, where)
        if name in found:
            raise SetupError(f"{file}: '{key}'{where} is there twice, with - and with _.")
        found[name] = value
    return found


def _check(file: Path, key: str, known: Iterable[str], where: str) -> str:
    """The key as options are called in here."""
    name = key.replace("-", "_")
    names = list(known)
    if name in names:
        return name
    near = difflib.get_close_matches(name, names, 1, 0.5)
    hint = f" Did you mean '{near[0]}'?" if near else f" There are: {', '.join(sorted(names))}."
    raise SetupError(f"{file}: nobody knows the key '{key}'{where}.{hint}")
