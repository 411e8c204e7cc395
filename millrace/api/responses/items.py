"""Input items: checked, brought into the shape that is stored and listed, each with an id.

What a model here cannot read (files, the calls of hosted tools) is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from millrace.api.encrypted_content import unseal
from millrace.api.responses.ids import item_id
from millrace.errors import BadRequest, Unsupported
from millrace.text.conversation import image_of

Item = dict[str, Any]
_ROLES = ("user", "assistant", "system", "developer")
_TEXTS = ("input_text", "output_text", "text")


def read_items(given: str | Sequence[Any]) -> list[Item]:
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    return [_read(item, f"input[{at}]") for at, item in enumerate(given)]


def _read(item: Any, where: str) -> Item:
    if not isinstance(item, Mapping):
        raise BadRequest(f"{where} is not an object.", param=where)
    kind = item.get("type")
    if kind is None:
        kind = "message" if "role" in item else "item_reference"
    reader = _READERS.get(kind) if isinstance(kind, str) else None
    if reader is None:
        raise Unsupported(f"{where}: items of type '{kind}' are not supported here.", param=where)
    return reader(item, where)


def _begun(item: Mapping[str, Any], kind: str) -> Item:
    id = item.get("id")
    return {"id": id if isinstance(id, str) and id else item_id(kind), "type": kind}


def _message(item: Mapping[str, Any], where: str) -> Item:
    role = item.get("role")
    if role not in _ROLES:
        raise BadRequest(
            f"{where}.role is {role!r}; it must be one of {', '.join(_ROLES)}.",
            param=f"{where}.role",
        )
    found = _begun(item, "message") | {
        "status": item.get("status") or "completed",
        "role": role,
        "content": _content(item.get("content"), role == "assistant", f"{where}.content"),
    }
    if item.get("phase") is not None:
        found["phase"] = item["phase"]
    return found


def _content(content: Any, said: bool, where: str) -> list[Item]:
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list):
        raise BadRequest(f"{where} must be text or a list of parts.", param=where)
    return [_part(part, said, f"{where}[{at}]") for at, part in enumerate(parts)]


def _part(part: Any, said: bool, where: str) -> Item:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind in _TEXTS:
        text = _text(part, "text", where)
        if said:
            return {"type": "output_text", "text": text, "annotations": []}
        return {"type": "input_text", "text": text}
    if kind == "refusal":
        return {"type": "refusal", "refusal": _text(part, "refusal", where)}
    if kind == "input_image" and not said:
        found = image_of(part, where)
        return {"type": kind, "image_url": found.source, "detail": part.get("detail") or "auto"}
    raise Unsupported(
        f"{where}: content of type '{kind}' is not supported here; this server reads text and "
        "pictures.",
        param=where,
    )


def _text(item: Mapping[str, Any], key: str, where: str) -> str:
    value = item.get(key)
    if not isinstance(value, str):
        raise BadRequest(f"{where}.{key} must be text.", param=f"{where}.{key}")
    return value


def _call(kind: str, body: str) -> Callable[[Mapping[str, Any], str], Item]:
    def read(item: Mapping[str, Any], where: str) -> Item:
        found = _begun(item, kind) | {
            "call_id": _text(item, "call_id", where),
            "name": _text(item, "name", where),
            body: _text(item, body, where),
            "status": item.get("status") or "completed",
        }
        if item.get("namespace") is not None:
            found["namespace"] = _text(item, "namespace", where)
        return found

    return read


def _output(kind: str) -> Callable[[Mapping[str, Any], str], Item]:
    def read(item: Mapping[str, Any], where: str) -> Item:
        output = item.get("output")
        if not isinstance(output, str):
            output = _content(output, False, f"{where}.output")
        return _begun(item, kind) | {
            "call_id": _text(item, "call_id", where),
            "output": output,
            "status": item.get("status") or "completed",
        }

    return read


def _reasoning(item: Mapping[str, Any], where: str) -> Item:
    found: Item = _begun(item, "reasoning") | {"summary": _thoughts(item, "summary", where)}
    if item.get("content") is not None:
        found["content"] = _thoughts(item, "content", where)
    if item.get("encrypted_content") is not None:
        found["encrypted_content"] = _text(item, "encrypted_content", where)
    return found


def _thoughts(item: Mapping[str, Any], key: str, where: str) -> list[Item]:
    parts = item.get(key) or []
    kind = "summary_text" if key == "summary" else "reasoning_text"
    if not isinstance(parts, list) or not all(isinstance(p, Mapping) for p in parts):
        raise BadRequest(f"{where}.{key} must be a list of parts.", param=f"{where}.{key}")
    return [{"type": kind, "text": _text(p, "text", f"{where}.{key}")} for p in parts]


def _reference(item: Mapping[str, Any], where: str) -> Item:
    return {"type": "item_reference", "id": _text(item, "id", where)}


def _compaction(item: Mapping[str, Any], where: str) -> Item:
    sealed = _text(item, "encrypted_content", where)
    if unseal(sealed) is None:
        raise BadRequest(
            f"{where}.encrypted_content was not made by this server, which cannot read it.",
            param=f"{where}.encrypted_content",
        )
    return _begun(item, "compaction") | {"encrypted_content": sealed}


def _more_tools(item: Mapping[str, Any], where: str) -> Item:
    tools = item.get("tools")
    if not isinstance(tools, list):
        raise BadRequest(f"{where}.tools must be a list.", param=f"{where}.tools")
    return _begun(item, "additional_tools") | {"role": "developer", "tools": tools}


_READERS: dict[str, Callable[[Mapping[str, Any], str], Item]] = {
    "message": _message,
    "function_call": _call("function_call", "arguments"),
    "function_call_output": _output("function_call_output"),
    "custom_tool_call": _call("custom_tool_call", "input"),
    "custom_tool_call_output": _output("custom_tool_call_output"),
    "reasoning": _reasoning,
    "item_reference": _reference,
    "additional_tools": _more_tools,
    "compaction": _compaction,
}
