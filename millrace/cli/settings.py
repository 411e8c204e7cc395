"""The configuration file, `millrace.toml`: options of `serve` under their names, tables of models and keys.

What the command line says comes before the environment (MILLRACE_PORT for --port), and that before the
file. A setting that does not exist is an error which names its line and the nearest one.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar, get_args

import msgspec
import typer
from msgspec import Meta

from millrace.cli.toml_lines import TomlLines
from millrace.config import LimitSettings, Role, Task, Weights, home
from millrace.errors import SetupError
from millrace.serving.keys import KeyEntry

FILE = "millrace.toml"
_TABLES = "millrace.tables"
_Count = Annotated[int, Meta(ge=1, le=2**53)]
"""A limit."""
_T = TypeVar("_T")


class LimitFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The limits that tables of models and of keys may set."""

    rate_requests: _Count | None = None
    rate_tokens: _Count | None = None
    max_running: _Count | None = None
    max_prompt_tokens: _Count | None = None
    max_answer_tokens: _Count | None = None

    def limits(self, *without: str) -> LimitSettings:
        names = [n for n in LimitSettings.__struct_fields__ if n not in without]
        return LimitSettings(**{name: getattr(self, name) for name in names})


class KeyTable(LimitFields, kw_only=True, forbid_unknown_fields=True):
    """What a table [keys.NAME] may say."""

    key: str | None = None
    """The secret; None where NAME is that of a line in the key file."""
    role: Role | None = None


class ModelTable(LimitFields, kw_only=True, forbid_unknown_fields=True):
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
    loop_guard: bool | None = None
    max_queue: Annotated[int, Meta(ge=0, le=2**53)] | None = None
    """Answers that may wait beside the `max_running` ones."""
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
    "loop_guard",
)


def use_file(context: typer.Context, chosen: str | None) -> str | None:
    """Read the file and have its options stand behind those of the command line."""
    file = _file(chosen)
    if file is None:
        return None
    known = {p.name or "": p for p in context.command.params}
    found = read(file, known)
    options = found.options
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
    context.meta[_TABLES] = found
    return str(file)


def _spelt(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def tables_of(context: typer.Context) -> dict[str, ModelTable]:
    found: FileSettings | None = context.meta.get(_TABLES)
    return found.models if found is not None else {}


def keys_of(context: typer.Context) -> list[KeyEntry]:
    found: FileSettings | None = context.meta.get(_TABLES)
    return found.keys if found is not None else []


def profile_of(name: str) -> ModelTable | None:
    """What the configuration that a server would find here says of a model."""
    if (file := _file(os.environ.get("MILLRACE_CONFIG"))) is None:
        return None
    tables = read(file).models
    return next((t for n, t in tables.items() if name in (n, *t.aliases)), None)


def _file(chosen: str | None) -> Path | None:
    """The one that was named, else one in the current folder, else one in millrace's own."""
    if chosen is not None:
        return Path(chosen).expanduser()
    places = (Path(FILE), home() / FILE)
    return next((p for p in places if os.path.isfile(p)), None)


class FileSettings(NamedTuple):
    """What a configuration file says."""

    options: dict[str, Any]
    models: dict[str, ModelTable]
    keys: list[KeyEntry]


def read(file: Path, options: Iterable[str] | None = None) -> FileSettings:
    """The file's options and models by their names, and its keys; `options` are those there are."""
    import tomllib

    try:
        text = file.read_text(encoding="utf-8-sig")
        raw = tomllib.loads(text)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise SetupError(f"The configuration {file} cannot be read: {reason}.") from error
    except tomllib.TOMLDecodeError as error:
        raise SetupError(f"{file} is not valid TOML: {error}.") from error
    return _Reader(file, TomlLines(text)).settings(raw, options)


class _Reader:
    """Checks what a file says; what is wrong is named with its line."""

    def __init__(self, file: Path, lines: TomlLines) -> None:
        self._file = file
        self._lines = lines

    def _place(self, *path: str) -> str:
        return f"{self._file}{self._lines.place(*path)}"

    def settings(self, raw: dict[str, Any], options: Iterable[str] | None) -> FileSettings:
        models = self._tables(raw, "models")
        keys = self._tables(raw, "keys")
        if options is None:
            options = [key.replace("-", "_") for key in raw]
        known = [n for n in options if n not in ("config_", "model", "help", "context_")]
        given = self._checked(raw, known)
        for key, value in given.items():
            if isinstance(value, dict):
                raise SetupError(f"{self._place(key)}: '{key}' is an option and takes no table.")
        return FileSettings(
            given,
            {name: self._model(name, table) for name, table in models.items()},
            [self._key(name, table) for name, table in keys.items()],
        )

    def _tables(self, raw: dict[str, Any], kind: str) -> dict[str, dict[str, Any]]:
        tables = raw.pop(kind, {})
        if not isinstance(tables, dict) or not all(isinstance(t, dict) for t in tables.values()):
            raise SetupError(f"{self._place(kind)}: {kind} are written as tables, [{kind}.NAME].")
        return tables

    def _model(self, name: str, raw: Mapping[str, Any]) -> ModelTable:
        path = ("models", name)
        found = self._table(path, raw, ModelTable)
        if found.weights is not None and found.weights not in get_args(Weights):
            raise self._wrong(path, "weights", f"must be one of {', '.join(get_args(Weights))}")
        most = found.max_answer_tokens
        if most is not None and found.max_tokens is not None and found.max_tokens > most:
            raise self._wrong(path, "max_tokens", f"is more than max_answer_tokens, {most}")
        return found

    def _key(self, name: str, raw: Mapping[str, Any]) -> KeyEntry:
        path = ("keys", name)
        if not name.strip() or not name.isprintable() or set(name) & set(":[]"):
            raise SetupError(
                f"{self._place(*path)}: '{name}' is no name for a key. Names are printable and without "
                "colons and brackets."
            )
        found = self._table(path, raw, KeyTable)
        place = f"{self._place(*path)}: [keys.{name}]"
        return KeyEntry(name, found.key, found.role, found.limits(), place)

    def _table(self, path: tuple[str, str], raw: Mapping[str, Any], kind: type[_T]) -> _T:
        fields: tuple[str, ...] = kind.__struct_fields__  # type: ignore[attr-defined]
        try:
            return msgspec.convert(self._checked(raw, fields, path), kind)
        except msgspec.ValidationError as error:
            said, _, where = str(error).partition(" - at ")
            if match := re.match(r"`\$\.(\w+)", where):
                raise self._wrong(path, match[1], said) from error
            raise SetupError(f"{self._place(*path)}: [{'.'.join(path)}] {error}.") from error

    def _wrong(self, path: tuple[str, ...], key: str, said: str) -> SetupError:
        spelt = next((k for k in (key, key.replace("_", "-")) if self._lines.has(*path, k)), key)
        return SetupError(f"{self._place(*path, spelt)}: [{'.'.join(path)}] {spelt}: {said}.")

    def _checked(
        self, raw: Mapping[str, Any], known: Iterable[str], path: tuple[str, ...] = ()
    ) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in raw.items():
            name = self._check(key, known, path)
            if name in found:
                place, where = self._place(*path, key), _inside(path)
                raise SetupError(f"{place}: '{key}'{where} is there twice, with - and with _.")
            found[name] = value
        return found

    def _check(self, key: str, known: Iterable[str], path: tuple[str, ...]) -> str:
        """The key as options are called in here."""
        name = key.replace("-", "_")
        names = list(known)
        if name in names:
            return name
        near = difflib.get_close_matches(name, names, 1, 0.5)
        hint = f" Did you mean '{near[0]}'?" if near else f" There are: {', '.join(sorted(names))}."
        place = self._place(*path, key)
        raise SetupError(f"{place}: there is no setting '{key}'{_inside(path)}.{hint}")


def _inside(path: tuple[str, ...]) -> str:
    return f" in [{'.'.join(path)}]" if path else ""
