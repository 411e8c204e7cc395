"""Rendering of chat templates: Jinja in a sandbox, with the helpers that model authors rely on.

A template is code that came with a model. What it costs is not known before it has run, so a server
renders in a process of its own (millrace.text.template_process), within a deadline and an output limit.
"""

from __future__ import annotations

import copy
import functools
import json
import types
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Protocol

import jinja2
from jinja2 import meta
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import SandboxedEnvironment

from millrace.errors import BadRequest, ModelError, TemplateTimeout

OUTPUT_PER_INPUT, LEAST_OUTPUT = 8, 1 << 20
"""Characters that a template may write: some repeat the tools, none repeats everything eight times."""


_LONGEST_ERROR = 1000


class TemplateRenderer(Protocol):
    """Where templates are compiled and run."""

    timeouts: int
    """How many renderings were cut off."""

    def variables(self, source: str) -> frozenset[str]:
        """The names that a template reads from outside; raises ModelError."""

    def render(self, source: str, values: Mapping[str, Any]) -> str:
        """The text; raises BadRequest, or ModelError for a template that cannot be compiled."""

    def needs_tools(self, source: str, values: Mapping[str, Any]) -> bool:
        """Whether the template iterates over its tools even if there are none."""

    def count_timeout(self) -> None:
        """Note that a rendering elsewhere was cut off."""

    def close(self) -> None:
        """End what runs for it."""


class LocalRenderer:
    """Renders in this process and thread."""

    timeouts = 0

    def __init__(self) -> None:
        self._results = functools.lru_cache(maxsize=8)(_compile)

    def _compiled(self, source: str) -> jinja2.Template:
        result = self._results(source)
        if isinstance(result, ModelError):
            raise result
        return result

    def variables(self, source: str) -> frozenset[str]:
        try:
            return frozenset(meta.find_undeclared_variables(_environment().parse(source)))
        except (jinja2.TemplateError, RecursionError) as error:
            raise _uncompilable(error) from error

    def needs_tools(self, source: str, values: Mapping[str, Any]) -> bool:
        try:
            _bounded(self._compiled(source), {**values, "tools": None}, LEAST_OUTPUT)
        except TypeError:
            return True
        except TemplateTimeout:
            raise
        except Exception:  # other demands of the template show when it is rendered
            pass
        return False

    def count_timeout(self) -> None:
        self.timeouts += 1

    def close(self) -> None:
        pass

    def render(self, source: str, values: Mapping[str, Any], most: int | None = None) -> str:
        """`most` is how many characters it may write."""
        compiled = self._compiled(source)
        # Some templates append to lists, so they may change what they are given.
        values = copy.deepcopy(dict(values))
        try:
            text = compiled.render(values) if most is None else _bounded(compiled, values, most)
            text.encode()
            return text
        except UnicodeEncodeError as error:
            raise BadRequest(
                "The model's chat template wrote half of a character that has two.",
                param="messages",
            ) from error
        except jinja2.TemplateError as error:
            raise BadRequest(
                f"The model's chat template refused the messages: {short(error)}",
                param="messages",
            ) from error
        except (
            TypeError,
            ValueError,
            KeyError,
            AttributeError,
            IndexError,
            ArithmeticError,
            MemoryError,
            RecursionError,
        ) as error:
            raise BadRequest(
                f"The model's chat template cannot render these messages: {short(error)}",
                param="messages",
            ) from error


def _bounded(compiled: jinja2.Template, values: Mapping[str, Any], most: int) -> str:
    pieces, length = list[str](), 0
    for piece in compiled.generate(values):
        pieces.append(piece)
        length += len(piece)
        if length > most:
            raise BadRequest(
                f"The model's chat template wrote more than {most} characters for these messages.",
                param="messages",
            )
    return "".join(pieces)


def _compile(source: str) -> jinja2.Template | ModelError:
    """The error is a result too: one that takes long to find is found once."""
    try:
        return _environment().from_string(source)
    except (
        jinja2.TemplateError,
        ArithmeticError,
        MemoryError,
        RecursionError,
        SyntaxError,
        ValueError,
    ) as error:
        return _uncompilable(error)


def _uncompilable(error: Exception) -> ModelError:
    return ModelError(f"The model's chat template has an error: {short(error)}")


def short(error: BaseException) -> str:
    """What an error says, which a template chooses, in a bounded number of characters."""
    text = str(error)
    if len(text) > _LONGEST_ERROR:
        text = text[:_LONGEST_ERROR] + "…"
    return text or type(error).__name__


class _Generation(Extension):
    """`{% generation %}` marks the assistant's part for training; when serving, it is its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Any) -> Any:
        return caller()


def _environment() -> SandboxedEnvironment:
    env = SandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    env.filters["tojson"] = _to_json
    env.globals["raise_exception"] = _raise
    env.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return env


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
        default=_listed,
    )


def _listed(value: Any) -> list[Any]:
    """Filters give generators, which templates write like the lists they stand for."""
    if isinstance(value, types.GeneratorType):
        return list(value)
    raise TypeError(f"a {type(value).__name__} cannot be written as JSON")


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
