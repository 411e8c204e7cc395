"""The tools a request offers, as the output formats and grammars need to know them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from millrace.errors import BadRequest


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """One function: its name, the JSON schema of its arguments, and whether that is enforced."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    description: str = ""
    strict: bool = False

    @property
    def properties(self) -> Mapping[str, Any]:
        found = self.parameters.get("properties")
        return found if isinstance(found, Mapping) else {}

    @property
    def required(self) -> tuple[str, ...]:
        found = self.parameters.get("required")
        return tuple(found) if isinstance(found, list) else ()


def tool_from_openai(tool: Mapping[str, Any]) -> ToolSpec:
    """A tool of the chat-completions shape, `{"type": "function", "function": {…}}`."""
    function = tool.get("function", tool)
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name:
        raise BadRequest("Every tool needs a function with a name.", param="tools")
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise BadRequest(f"The parameters of tool '{name}' must be a JSON schema.", param="tools")
    return ToolSpec(
        name=name,
        parameters=parameters or {},
        description=str(function.get("description") or ""),
        strict=bool(function.get("strict")),
    )
