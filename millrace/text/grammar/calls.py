"""Tool calls as grammar, in the family's own markup, so that what comes out parses and validates.

One builder per syntax, the mirror of the decoders. Arguments are held to the tool's schema;
a syntax or schema that cannot be is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from millrace.errors import Unsupported
from millrace.text.formats.call_encoder import to_json, written_syntax
from millrace.text.formats.coerce import kinds
from millrace.text.formats.syntax import (
    CallSyntax,
    HeaderCalls,
    JsonCalls,
    OutputFormat,
    PythonCalls,
    TaggedCalls,
)
from millrace.text.formats.tools import ToolSpec
from millrace.text.grammar.lark import Builder, quoted
from millrace.text.grammar.schema import closed, enforceable
from millrace.text.grammar.values import (
    delimited_object,
    element,
    free_text,
    options,
    sequence,
    with_definitions,
)


class CallGrammar:
    """The calls of one family with one set of tools, as rules of a builder."""

    def __init__(
        self, build: Builder, format: OutputFormat, tools: Sequence[ToolSpec], parallel: bool
    ) -> None:
        self._build = build
        self._parallel = parallel
        self._tools = list(tools)
        self._schemas = [
            enforceable(closed(tool.parameters), f"tools.{tool.name}.parameters") for tool in tools
        ]
        self.syntax: CallSyntax | None = (
            None if format.messages is not None and not format.calls else written_syntax(format)
        )

    def all(self, skip: str = "", opened: str = "", marked: bool = False) -> str:
        """Every call of an answer.

        `skip` is opening text that already stands there, of a call that is held to the grammar
        alone; `opened` the same for the first of several. `marked` asks for an opening mark even
        where the family can do without.
        """
        syntax = self.syntax
        if isinstance(syntax, JsonCalls):
            return self._json(syntax, skip, marked)
        if isinstance(syntax, HeaderCalls):
            return self._joined(syntax.section or ("", ""), syntax.between, skip, opened)
        if isinstance(syntax, TaggedCalls):
            return self._joined(syntax.wrap, syntax.between, skip, "")
        if isinstance(syntax, PythonCalls):
            return self._python(syntax, skip)
        raise Unsupported("This model has no way to call tools.", param="tool_choice")

    def arguments(self, index: int) -> str:
        return self._build.schema(self._schemas[index])

    def one(self, index: int, skip: str = "", prefix: str = "") -> str:
        """One call of one tool, without what stands around all calls."""
        syntax = self.syntax
        if isinstance(syntax, HeaderCalls):
            return self._header(syntax, index, skip, prefix)
        if isinstance(syntax, TaggedCalls):
            return self._tagged(syntax, index, skip)
        raise Unsupported("This model has no way to call tools.", param="tool_choice")

    def _many(self, item: str, between: str) -> str:
        if not self._parallel:
            return item
        separator = self._build.literal(between) if between else ""
        return f"{item} ({separator} {item})*"

    def _joined(self, wrap: tuple[str, str], between: str, skip: str, opened: str) -> str:
        build = self._build
        numbers = range(len(self._tools))
        call = build.rule("call", " | ".join(self.one(number, skip) for number in numbers))
        if skip:
            return call
        calls = self._many(call, between)
        if opened:
            first = build.rule("first", " | ".join(self.one(n, opened, "first_") for n in numbers))
            calls = f"{first} ({self._text(between)} {call})*" if self._parallel else first
        return build.rule("calls", f"{self._text(wrap[0])} {calls} {self._text(wrap[1])}".strip())

    def _json(self, syntax: JsonCalls, skip: str, marked: bool) -> str:
        build = self._build
        bare = syntax.soft_inside and bool(syntax.soft) and not (marked and syntax.opens)
        body = build.rule("body", " | ".join(self._json_bodies(syntax, skip if bare else "")))
        opening = "" if bare else (syntax.opens or syntax.soft)[0]
        if skip:
            opening = opening.partition(skip)[2]
        close = (syntax.closes or (syntax.fence,))[0]
        pad = syntax.padding
        if syntax.layout == "each":
            call = f"{self._text(opening + pad)} {body} {self._text(pad + close)}"
            if skip:
                return build.rule("calls", call)
            return build.rule("calls", self._many(build.rule("call", call), syntax.between))
        if syntax.layout == "lines":
            start, end = opening + pad, pad + close
        else:
            start, end = f"{opening}[{pad}", f"{pad}]{close}"
        if bare and skip:
            start = ""
        between = "\n" if syntax.layout == "lines" else syntax.between
        calls = f"{self._text(start)} {self._many(body, between)} {self._text(end)}"
        return build.rule("calls", calls)

    def _json_bodies(self, syntax: JsonCalls, skip: str) -> list[str]:
        """The object of one call, for each tool."""
        bodies = []
        for index, tool in enumerate(self._tools):
            name, before, after = to_json(tool.name), "", quoted("}")
            if syntax.name_is_key:
                lead = "{" + name + ": "
            else:
                lead = f"{to_json(syntax.name_keys[0])}: {name}, {to_json(syntax.args_keys[0])}: "
                if syntax.write_id == "before":
                    key = to_json(syntax.id_keys[-1])
                    before = quoted("{" + key + ': "') + " /[0-9]{1,2}/ "
                    lead = '", ' + lead
                else:
                    lead = "{" + lead
            if syntax.write_id == "after":
                key = quoted(f', {to_json(syntax.id_keys[0])}: "')
                after = f"{key} /[a-zA-Z0-9]{{9}}/ " + quoted('"}')
            if skip:
                lead = lead.removeprefix(skip.lstrip("["))
            bodies.append(f"{before}{quoted(lead)} {self.arguments(index)} {after}")
        return bodies

    def _text(self, text: str) -> str:
        return self._build.literal(text) if text else ""

    def _header(self, syntax: HeaderCalls, index: int, skip: str, prefix: str) -> str:
        build, tool = self._build, self._tools[index]
        head, _, tail = syntax.template.partition("{arguments}")
        head = head.replace("{name}", tool.name)
        if skip:
            head = head.partition(skip)[2]
        parts = []
        for number, part in enumerate(head.replace("{id}", "{index}").split("{index}")):
            if number:
                parts.append("/[a-zA-Z0-9]{9}/" if "{id}" in syntax.template else "/[0-9]{1,2}/")
            parts.append(self._text(part))
        schema = self._schemas[index]
        if syntax.dialect.delimiter:
            arguments = build.rule(
                f"t{index}_args",
                delimited_object(build, f"t{index}", schema, schema, syntax.dialect.delimiter),
            )
        else:
            arguments = build.schema(schema)
        text = " ".join([*parts, arguments, self._text(tail)])
        return build.rule(f"{prefix}t{index}_call", text)

    def _tagged(self, syntax: TaggedCalls, index: int, skip: str) -> str:
        build, tool, schema = self._build, self._tools[index], self._schemas[index]
        head = syntax.call_open.replace("{name}", tool.name)
        if skip:
            head = head.partition(skip)[2]
        opening = " ".join(
            ("/[0-9]{1,2}/ " if number else "") + self._text(part)
            for number, part in enumerate(head.split("{index}"))
        )
        required = set(schema.get("required") or ())
        items = [
            (key in required, self._parameter(syntax, f"t{index}_p{number}", key, value, schema))
            for number, (key, value) in enumerate(schema["properties"].items())
        ]
        body = sequence(build, f"t{index}", items, "")
        return build.rule(f"t{index}_call", f"{opening} {body} {self._text(syntax.call_close)}")

    def _parameter(
        self, syntax: TaggedCalls, name: str, key: str, schema: Any, root: Mapping[str, Any]
    ) -> str:
        build = self._build
        allowed = kinds(schema, root)
        text = not allowed or "string" in allowed
        written = (
            syntax.param_write.replace("{key}", key)
            .replace("{string}", "true" if text else "false")
            .replace("{type}", _type_word(allowed))
        )
        head, _, tail = written.partition("{value}")
        if syntax.nested:
            return f"{self._text(head)} {element(build, name, schema, root, syntax.nested, tail)}"
        chosen = options(schema, root)
        if chosen is not None:
            texts = [option if isinstance(option, str) else to_json(option) for option in chosen]
            choice = build.rule(name, " | ".join(build.literal(option) for option in texts))
            return f"{self._text(head)} {choice} {self._text(tail)}"
        if text:
            close = syntax.value_closes[0]
            before = tail[: tail.index(close) + len(close)]
            inner = build.until(name, before, free_text(schema, root))
            return f"{self._text(head)} {inner} {self._text(tail[len(before) :])}"
        value = build.schema(enforceable(with_definitions(schema, root), f"tools.parameters.{key}"))
        return f"{self._text(head)} {value} {self._text(tail)}"

    def _python(self, syntax: PythonCalls, skip: str) -> str:
        build = self._build
        calls = []
        for index, (tool, schema) in enumerate(zip(self._tools, self._schemas, strict=True)):
            required = set(schema.get("required") or ())
            items = []
            for key, value in schema["properties"].items():
                part = enforceable(with_definitions(value, schema), f"tools.{tool.name}.{key}")
                items.append((key in required, f"{quoted(key + '=')} {build.schema(part)}"))
            body = sequence(build, f"t{index}", items, '", "')
            calls.append(
                build.rule(f"t{index}_call", f"{quoted(tool.name + '(')} {body} {quoted(')')}")
            )
        call = build.rule("call", " | ".join(calls))
        if syntax.soft:
            opening, end, between = f"{syntax.soft[0]}\n", f"\n{syntax.fence}", "\n"
        else:
            opening = (syntax.opens[0] if syntax.opens else "") + "["
            end, between = "]" + (syntax.closes[0] if syntax.closes else ""), ", "
        if skip:
            opening = opening.partition(skip)[2]
        text = f"{self._text(opening)} {self._many(call, between)} {self._text(end)}"
        return build.rule("calls", text)


def _type_word(allowed: frozenset[str]) -> str:
    if not allowed or "string" in allowed:
        return "string"
    kind = sorted(allowed)[0]
    return "number" if kind == "integer" else kind
