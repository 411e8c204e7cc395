"""Tools: what the request offers, as the functions a model sees, and the way back to its names.

Groups are opened and freeform tools become functions of one text; hosted tools are left out, named.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from millrace.errors import BadRequest, Unsupported
from millrace.text.conversation import ToolChoice

Tool = Mapping[str, Any]


@dataclass(frozen=True)
class Offered:
    """A tool as the client knows it."""

    kind: Literal["function", "custom"]
    name: str
    namespace: str | None = None


@dataclass
class Toolbox:
    functions: list[dict[str, Any]] = field(default_factory=list)
    """In chat's shape, under flat names."""
    offered: dict[str, Offered] = field(default_factory=dict)
    named: dict[str, list[str]] = field(default_factory=dict)
    """The flat names of all tools that the client has one name for."""
    ignored: dict[str, None] = field(default_factory=dict)
    """What the model is not told of, in its order."""


@dataclass(frozen=True)
class ChosenTools:
    functions: list[dict[str, Any]]
    choice: ToolChoice = "auto"
    name: str | None = None


MOST_TOOLS = 2048
"""Tools of one request, those in groups among them."""


def check_tools(count: int, param: str = "tools") -> None:
    """Refuse more tools than a request may offer."""
    if count > MOST_TOOLS:
        raise BadRequest(
            f"'{param}' has {count} tools; one request may offer at most {MOST_TOOLS}.", param=param
        )


def flat_name(namespace: str | None, name: str) -> str:
    """One name for a tool in a group; the same whether it is offered or was called before."""
    if not namespace:
        return name
    return namespace + name if namespace.endswith("__") else f"{namespace}__{name}"


def flat_tool(where: str, tool: Mapping[str, Any]) -> dict[str, Any]:
    """Chat keeps a tool's particulars under its type's name."""
    kind = tool.get("type", "function")
    if kind not in ("function", "custom"):
        return dict(tool)
    inner = tool.get(kind)
    if not isinstance(inner, Mapping):
        raise BadRequest(f"{where} has no '{kind}'.", param=where)
    flat = {**inner, "type": kind}
    format = inner.get("format")
    if isinstance(format, Mapping) and isinstance(format.get("grammar"), Mapping):
        flat["format"] = {**format["grammar"], "type": format.get("type")}
    return flat


def open_tools(tools: Sequence[Tool]) -> Toolbox:
    check_tools(len(tools))
    box = Toolbox()
    for at, tool in enumerate(tools):
        where = f"tools[{at}]"
        kind = tool.get("type") if isinstance(tool, Mapping) else None
        if not isinstance(kind, str):
            raise BadRequest(f"{where} has no type.", param=where)
        if kind == "namespace":
            _open_namespace(box, tool, where)
        elif kind in ("function", "custom"):
            _add(box, tool, where, None)
        else:
            _ignore(box, f"tools.{kind}")
    return box


def _open_namespace(box: Toolbox, tool: Tool, where: str) -> None:
    name, members = _name(tool, where), tool.get("tools")
    if not isinstance(members, list) or not all(isinstance(m, Mapping) for m in members):
        raise BadRequest(f"{where}.tools must be a list of tools.", param=f"{where}.tools")
    check_tools(len(box.functions) + len(members))
    about = str(tool.get("description") or "")
    for at, member in enumerate(members):
        inner = f"{where}.tools[{at}]"
        if member.get("type") not in ("function", "custom"):
            _ignore(box, f"tools.{name}.{member.get('type')}")
            continue
        _add(box, member, inner, name)
        if about:
            # Said once: in a large group it would be most of the prompt otherwise.
            function = box.functions[-1]["function"]
            about = f"[{name}: {about}]\n{function.get('description', '')}"
            function["description"], about = about.rstrip(), ""


def _ignore(box: Toolbox, name: str) -> None:
    box.ignored[name] = None


def _name(tool: Tool, where: str) -> str:
    name = tool.get("name")
    if not isinstance(name, str) or not name:
        raise BadRequest(f"{where} has no name.", param=f"{where}.name")
    return name


def _add(box: Toolbox, tool: Tool, where: str, namespace: str | None) -> None:
    name = _name(tool, where)
    flat = flat_name(namespace, name)
    if flat in box.offered:
        raise BadRequest(f"{where}: there are two tools with the name '{flat}'.", param=where)
    if tool["type"] == "custom":
        function = _freeform(box, tool, where)
        box.offered[flat] = Offered("custom", name, namespace)
    else:
        kept = ("description", "parameters", "strict")
        function = {k: tool[k] for k in kept if tool.get(k) is not None}
        box.offered[flat] = Offered("function", name, namespace)
    box.named.setdefault(name, []).append(flat)
    box.functions.append({"type": "function", "function": {"name": flat} | function})


def _freeform(box: Toolbox, tool: Tool, where: str) -> dict[str, Any]:
    """A tool that takes free text, as a function with one text parameter.

    A regular expression for the text is enforced. A Lark grammar cannot be inside a JSON string:
    the model is shown it, and the response says that it was not enforced.
    """
    format = tool.get("format") or {}
    if not isinstance(format, Mapping):
        raise BadRequest(f"{where}.format must be an object.", param=f"{where}.format")
    about = str(tool.get("description") or "")
    text: dict[str, Any] = {"type": "string", "description": "The input as it is, in full."}
    strict = False
    if format.get("type") == "grammar":
        syntax, definition = format.get("syntax"), format.get("definition")
        if not isinstance(definition, str) or syntax not in ("lark", "regex"):
            raise BadRequest(
                f"{where}.format must have a definition, and the syntax lark or regex.",
                param=f"{where}.format",
            )
        if syntax == "regex":
            text["pattern"], strict = f"^(?:{definition})$", True
        else:
            about += f"\nThe input must follow this Lark grammar:\n{definition}"
            _ignore(box, f"tools.{tool['name']}.format")
    parameters = {
        "type": "object",
        "properties": {"input": text},
        "required": ["input"],
        "additionalProperties": False,
    }
    return {"description": about, "parameters": parameters, "strict": strict}


def choose(choice: str | Tool | None, box: Toolbox) -> ChosenTools:
    """What the request's tool_choice means for the functions."""
    if choice is None or choice == "auto":
        return ChosenTools(box.functions)
    if choice == "none":
        return ChosenTools(box.functions, "none")
    if choice == "required":
        return _required(box.functions)
    if not isinstance(choice, Mapping):
        raise BadRequest(
            "tool_choice must be none, auto, required or an object.", param="tool_choice"
        )
    match choice.get("type"):
        case "function" | "custom":
            return ChosenTools(box.functions, "required", _find(choice, box))
        case "allowed_tools":
            return _allowed(choice, box)
        case kind:
            raise Unsupported(
                f"tool_choice: this server cannot run the tool '{kind}'.", param="tool_choice"
            )


def _required(functions: list[dict[str, Any]]) -> ChosenTools:
    if not functions:
        raise BadRequest(
            "tool_choice demands a call, and the request offers no function.", param="tool_choice"
        )
    return ChosenTools(functions, "required")


def _find(wanted: Tool, box: Toolbox) -> str:
    """The flat name of the tool that a choice names."""
    name = str(wanted.get("name"))
    namespace = wanted.get("namespace")
    exact = flat_name(namespace if isinstance(namespace, str) else None, name)
    if exact in box.offered:
        return exact
    found = box.named.get(name, [])
    if len(found) != 1:
        raise BadRequest(
            f"tool_choice names the tool '{name}', which the request does not offer"
            f"{' only once' if found else ''}. It offers: {', '.join(box.offered) or 'none'}.",
            param="tool_choice",
        )
    return found[0]


def _allowed(choice: Tool, box: Toolbox) -> ChosenTools:
    listed = choice.get("tools")
    if not isinstance(listed, list) or not all(isinstance(t, Mapping) for t in listed):
        raise BadRequest("tool_choice.tools must be a list of tools.", param="tool_choice")
    groups = {str(t.get("name")) for t in listed if t.get("type") == "namespace"}
    names = {flat for flat, offered in box.offered.items() if offered.namespace in groups}
    check_tools(len(listed), "tool_choice.tools")
    names |= {_find(t, box) for t in listed if t.get("type") in ("function", "custom")}
    functions = [f for f in box.functions if f["function"]["name"] in names]
    return _required(functions) if choice.get("mode") == "required" else ChosenTools(functions)
