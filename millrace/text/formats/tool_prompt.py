"""Tools and their results put into words, for models whose templates know nothing of tools."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from millrace.text.formats.call_encoder import Call, write_calls
from millrace.text.formats.coerce import coerce_json, kinds, parameter_order, resolve
from millrace.text.formats.syntax import OutputFormat
from millrace.text.formats.tools import ToolSpec

_PYTHON = {
    "string": "str",
    "integer": "int",
    "number": "float",
    "boolean": "bool",
    "array": "list",
    "object": "dict",
    "null": "None",
}


def show_tools(format: OutputFormat, tools: Sequence[ToolSpec]) -> str:
    """A passage for the system message that says which tools there are and how to call them."""
    return _as_python(tools) if format.python_tools else _as_json(format, tools)


def show_result(format: OutputFormat, name: str, content: str) -> str:
    """A tool's result as the user tells it."""
    if format.python_tools:
        return f"```tool_output\n{content}\n```"
    return f"<tool_response>\n{content}\n</tool_response>"


def _as_json(format: OutputFormat, tools: Sequence[ToolSpec]) -> str:
    lines = [
        json.dumps(
            {"name": tool.name, "description": tool.description, "parameters": tool.parameters},
            ensure_ascii=False,
        )
        for tool in tools
    ]
    example = write_calls(format, [Call("function_name", {"argument": "value"})])
    return (
        "You may use the functions listed here, one JSON description per line:\n"
        + "\n".join(lines)
        + "\nTo call one, answer in exactly this form, and add one such part per further call:\n"
        + example
        + "\nThe results come back in the next message. Without need of a function, just answer."
    )


def _as_python(tools: Sequence[ToolSpec]) -> str:
    stubs = "\n\n".join(_stub(tool) for tool in tools)
    return (
        "You may call the following Python functions:\n\n"
        f"```python\n{stubs}\n```\n\n"
        "To call one or more of them, write the calls, with keyword arguments and one per line, "
        "in a fence like this:\n\n"
        "```tool_code\nfunction_name(argument=value)\n```\n\n"
        "What they return comes back in a tool_output fence. Without need of a function, just "
        "answer."
    )


def _stub(tool: ToolSpec) -> str:
    required = set(tool.required)
    arguments = []
    notes = []
    for key in parameter_order(tool.parameters):
        schema = resolve(tool.properties.get(key), tool.parameters)
        text = f"{key}: {_annotation(schema, tool.parameters)}"
        if key not in required:
            text += _default(schema, tool.parameters)
        arguments.append(text)
        note = _note(schema)
        if note:
            notes.append(f"        {key}: {note}")
    doc = (tool.description or tool.name).replace('"""', "'''").strip()
    body = [f'    """{doc}']
    if notes:
        body += ["", "    Args:", *notes, "    "]
        body[-1] += '"""'
    else:
        body[-1] += '"""'
    return "\n".join([f"def {tool.name}({', '.join(arguments)}):", *body])


def _default(schema: Mapping[str, Any], root: Mapping[str, Any]) -> str:
    """What an optional parameter is when it is left out, in its own type."""
    if "default" not in schema:
        return " = None" if kinds(schema, root) <= {"null"} else " | None = None"
    value = json.loads(coerce_json(json.dumps(schema["default"]), schema, root))
    optional = value is None and "null" not in kinds(schema, root)
    return f"{' | None' if optional else ''} = {value!r}"


def _note(schema: Mapping[str, Any]) -> str:
    text = " ".join(str(schema.get("description") or "").split())
    options = schema.get("enum")
    if isinstance(options, list):
        text += f" One of {', '.join(map(repr, options))}."
    return text.strip().replace('"""', "'''")


def _annotation(schema: Mapping[str, Any], root: Mapping[str, Any], depth: int = 0) -> str:
    names = []
    for kind in sorted(kinds(schema, root)):
        name = _PYTHON.get(kind, "object")
        if kind == "array" and depth < 4:
            items = resolve(schema.get("items"), root)
            name = f"list[{_annotation(items, root, depth + 1)}]" if items else "list"
        names.append(name)
    return " | ".join(names) or "object"
