"""Chat templates: Jinja in a sandbox, with the helpers that model authors rely on."""

from __future__ import annotations

import copy
import functools
import json
import types
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import meta
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import SandboxedEnvironment

from millrace.errors import BadRequest, ModelError


class ChatTemplate:
    def __init__(self, source: str, **constants: Any) -> None:
        """`constants` are visible to the template: bos_token, eos_token and the like."""
        self.source = source
        self._constants = constants
        try:
            self._compiled = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(f"The model's chat template has an error: {error}") from error

    @functools.cached_property
    def variables(self) -> frozenset[str]:
        """The names that the template reads from outside."""
        return frozenset(meta.find_undeclared_variables(_environment().parse(self.source)))

    @functools.cached_property
    def _needs_tools(self) -> bool:
        """Whether it goes through a list of tools even if there are none."""
        asked = [{"role": "user", "content": "?"}]
        try:
            self._compiled.render(messages=asked, tools=None, **self._constants)
        except TypeError:
            return True
        except Exception:  # it has other wishes, which are not asked about here
            pass
        return False

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """The prompt's text. What the template refuses is the request's fault."""
        if not tools:
            tools = [] if self._needs_tools else None
        # Some templates gather things in lists, so they may change what they are given: a copy.
        values = copy.deepcopy(self._constants | kwargs)
        try:
            return self._compiled.render(
                messages=copy.deepcopy(list(messages)),
                tools=None if tools is None else copy.deepcopy(list(tools)),
                add_generation_prompt=add_generation_prompt,
                **values,
            )
        except jinja2.TemplateError as error:
            raise BadRequest(
                f"The model's chat template refused the messages: {error}", param="messages"
            ) from error
        except (TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
            raise BadRequest(
                f"The model's chat template cannot render these messages: {error}",
                param="messages",
            ) from error


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
