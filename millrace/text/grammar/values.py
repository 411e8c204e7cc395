"""Argument values outside of JSON, as grammar: delimited strings, elements, text in tags.

Follows a schema as far as types, properties, items, enums, lengths and patterns go.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from millrace.errors import BadRequest
from millrace.text.formats.call_encoder import to_json
from millrace.text.formats.coerce import kinds, resolve
from millrace.text.grammar.lark import Builder, quoted

_SCALARS = frozenset({"string", "number", "boolean", "null"})


def sequence(build: Builder, name: str, items: Sequence[tuple[bool, str]], separator: str) -> str:
    """Items in order, the optional ones left out or not, with separators between those there."""
    if not items:
        return '""'
    after = f"{name}_after{len(items)}"
    build.rule(after, '""')
    empty = build.rule(f"{name}_from{len(items)}", '""')
    for index in range(len(items) - 1, -1, -1):
        required, item = items[index]
        following = f"{separator} {item} {after}" if separator else f"{item} {after}"
        later = build.rule(
            f"{name}_after{index}", following if required else f"{following} | {after}"
        )
        first = f"{item} {after}"
        empty = build.rule(f"{name}_from{index}", first if required else f"{first} | {empty}")
        after = later
    return empty


def repeated(item: str, schema: Mapping[str, Any], separator: str) -> str:
    """As many items as the schema of their list allows."""
    low = int(schema.get("minItems") or 0)
    high = schema.get("maxItems")
    if high is not None and int(high) == 0:
        return '""'
    more = "" if high is None else str(int(high) - 1)
    text = f"{item} ({separator} {item}){{{max(low - 1, 0)},{more}}}"
    return f"({text})" if low else f"({text})?"


def free_text(schema: Any, root: Mapping[str, Any]) -> str:
    """The regular expression of a string value that stands without quotes."""
    found = resolve(schema, root)
    given = found.get("pattern")
    if isinstance(given, str):
        begin = "" if given.startswith("^") else r"(.|\n)*"
        end = "" if given.endswith("$") and not given.endswith(r"\$") else r"(.|\n)*"
        return (
            begin + "(" + given.removeprefix("^").removesuffix("$" if not end else "") + ")" + end
        )
    low, high = found.get("minLength"), found.get("maxLength")
    if low is None and high is None:
        return r"(.|\n)*"
    return rf"(.|\n){{{low or 0},{high if high is not None else ''}}}"


def options(schema: Any, root: Mapping[str, Any]) -> list[Any] | None:
    found = resolve(schema, root)
    if "const" in found:
        return [found["const"]]
    listed = found.get("enum")
    return listed if isinstance(listed, list) else None


def with_definitions(schema: Any, root: Mapping[str, Any]) -> dict[str, Any]:
    """A part of a schema that can stand alone: what it may refer to comes with it."""
    shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
    return {**(schema if isinstance(schema, Mapping) else {}), **shared}


def variants(schema: Mapping[str, Any]) -> list[Any] | None:
    """The alternatives of a schema that is nothing but a choice of others."""
    if "allOf" in schema:
        raise BadRequest(
            "A tool's parameters use 'allOf', which cannot be enforced in this model's way of "
            "writing calls. Merge its parts into one schema.",
            param="tools",
        )
    found = schema.get("anyOf") or schema.get("oneOf")
    return found if isinstance(found, list) else None


def delimited(build: Builder, name: str, schema: Any, root: Mapping[str, Any], quote: str) -> str:
    """A value whose strings stand between delimiters and whose keys are bare."""
    found = resolve(schema, root)
    if (id(found), quote) in build.known:
        return build.known[id(found), quote]
    build.known[id(found), quote] = name
    chosen, choice = options(found, root), variants(found)
    if chosen is not None:
        texts = [
            f"{quote}{option}{quote}" if isinstance(option, str) else to_json(option)
            for option in chosen
        ]
        return build.rule(name, " | ".join(build.literal(text) for text in texts))
    if choice is not None:
        forms = [delimited(build, f"{name}_v{i}", v, root, quote) for i, v in enumerate(choice)]
        return build.rule(name, " | ".join(forms))
    forms = []
    for kind in sorted(kinds(found, root) or _SCALARS):
        part = f"{name}_{kind}"
        if kind == "string":
            inner = build.until(f"{part}_t", quote, free_text(found, root))
            forms.append(f"{build.literal(quote)} {inner}")
        elif kind == "array":
            item = delimited(build, f"{part}_i", found.get("items"), root, quote)
            forms.append(f'"[" {repeated(item, found, quoted(","))} "]"')
        elif kind == "object":
            forms.append(delimited_object(build, part, found, root, quote))
        else:
            forms.append(build.schema({**with_definitions(found, root), "type": kind}))
    return build.rule(name, " | ".join(forms))


def delimited_object(
    build: Builder, name: str, schema: Any, root: Mapping[str, Any], quote: str
) -> str:
    found = resolve(schema, root)
    required = set(found.get("required") or ())
    items = []
    for index, (key, value) in enumerate((found.get("properties") or {}).items()):
        inner = delimited(build, f"{name}_p{index}", value, root, quote)
        items.append((key in required, f"{quoted(key + ':')} {inner}"))
    return f'"{{" {sequence(build, name, items, quoted(","))} "}}"'


def element(
    build: Builder, name: str, schema: Any, root: Mapping[str, Any], token: str, close: str
) -> str:
    """A value written as elements in elements, up to and with its closing tag."""
    found = resolve(schema, root)
    if (id(found), close) in build.known:
        return build.known[id(found), close]
    build.known[id(found), close] = name
    chosen, choice = options(found, root), variants(found)
    if chosen is not None:
        texts = [option if isinstance(option, str) else to_json(option) for option in chosen]
        return build.rule(name, " | ".join(build.literal(text + close) for text in texts))
    allowed = kinds(found, root)
    if not allowed or "string" in allowed:
        return build.until(name, close, free_text(found, root))
    if choice is not None:
        forms = [
            element(build, f"{name}_v{i}", v, root, token, close) for i, v in enumerate(choice)
        ]
        return build.rule(name, " | ".join(forms))
    forms = []
    for kind in sorted(allowed):
        if kind == "object":
            forms.append(f"{_fields(build, name, found, root, token)} {build.literal(close)}")
        elif kind == "array":
            inner = element(build, f"{name}_i", found.get("items"), root, token, f"{token}</item>")
            items = repeated(f"({build.literal(f'{token}<item>')} {inner})", found, "")
            forms.append(f"{items} {build.literal(close)}")
        else:
            plain = build.schema({**with_definitions(found, root), "type": kind})
            forms.append(f"{plain} {build.literal(close)}")
    return build.rule(name, " | ".join(forms))


def _fields(
    build: Builder, name: str, schema: Mapping[str, Any], root: Mapping[str, Any], token: str
) -> str:
    required = set(schema.get("required") or ())
    parts = []
    for index, (key, value) in enumerate((schema.get("properties") or {}).items()):
        inner = element(build, f"{name}_p{index}", value, root, token, f"{token}</{key}>")
        parts.append((key in required, f"{build.literal(f'{token}<{key}>')} {inner}"))
    return sequence(build, name, parts, "")
