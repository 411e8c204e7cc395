"""A request as Claude Code sends it: every field that was seen on the wire, with words of our own."""

from __future__ import annotations

from typing import Any

_CACHE = {"type": "ephemeral"}


def _tool(name: str, about: str, properties: dict[str, Any], *required: str) -> dict[str, Any]:
    return {
        "name": name,
        "description": about,
        "input_schema": {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "type": "object",
            "properties": properties,
            "required": list(required),
            "additionalProperties": False,
        },
    }


_PATH = {"type": "string", "minLength": 1, "description": "An absolute path."}
_FLAG = {"type": "boolean", "default": False}
_TEXT = {"type": "string"}

_TOOLS = [
    _tool(
        "Agent",
        "Hands a task to a helper.",
        {
            "prompt": _TEXT,
            "model": {"type": "string", "enum": ["small", "large"]},
            "isolation": {"const": "worktree"},
        },
        "prompt",
    ),
    _tool(
        "Bash",
        "Runs a command.",
        {
            "command": _TEXT,
            "timeout": {"type": "number", "minimum": 1, "maximum": 600000},
            "run_in_background": _FLAG,
        },
        "command",
    ),
    _tool(
        "Read",
        "Reads a file.",
        {
            "file_path": _PATH,
            "offset": {"type": "integer", "minimum": 0, "maximum": 9007199254740991},
            "limit": {"type": "integer", "exclusiveMinimum": 0},
            "pages": {"type": "string", "pattern": "^[0-9]+(-[0-9]+)?$"},
        },
        "file_path",
    ),
    _tool(
        "Edit",
        "Replaces text in a file.",
        {"file_path": _PATH, "old_string": _TEXT, "new_string": _TEXT, "replace_all": _FLAG},
        "file_path",
        "old_string",
        "new_string",
    ),
    _tool(
        "Write", "Writes a file.", {"file_path": _PATH, "content": _TEXT}, "file_path", "content"
    ),
    _tool(
        "WebFetch",
        "Gets a page.",
        {"url": {"type": "string", "format": "uri"}, "prompt": _TEXT},
        "url",
        "prompt",
    ),
    _tool(
        "AskUser",
        "Asks the user.",
        {
            "questions": {
                "type": "array",
                "minItems": 1,
                "maxItems": 4,
                "items": {
                    "type": "object",
                    "properties": {
                        "question": _TEXT,
                        "header": {"type": "string", "maxLength": 12},
                    },
                    "required": ["question"],
                    "additionalProperties": False,
                },
            },
            "answers": {
                "type": "object",
                "propertyNames": {"type": "string"},
                "additionalProperties": {"type": "string"},
            },
        },
        "questions",
    ),
    _tool(
        "TaskUpdate",
        "Changes a task.",
        {
            "taskId": _TEXT,
            "status": {
                "anyOf": [
                    {"type": "string", "enum": ["pending", "in_progress", "completed"]},
                    {"type": "string", "const": "deleted"},
                ]
            },
            "metadata": {
                "type": "object",
                "propertyNames": {"type": "string"},
                "additionalProperties": {},
            },
        },
        "taskId",
    ),
    *(
        _tool(f"Extra{n}", f"Does a further thing, the {n}th.", {"id": _TEXT, "wait": _FLAG}, "id")
        for n in range(16)
    ),
]


def body(prompt: str = "say hi") -> dict[str, Any]:
    reminder = "<system-reminder>\nToday is a good day.\n</system-reminder>\n"
    return {
        "system": [
            {"type": "text", "text": "billing: cli; version=2.1"},
            {"type": "text", "text": "You are a coding agent.", "cache_control": _CACHE},
            {
                "type": "text",
                "text": "\nYou help with software.\n" + "Work with care. " * 400,
                "cache_control": _CACHE | {"ttl": "1h"},
            },
        ],
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": reminder},
                    {"type": "text", "text": prompt, "cache_control": _CACHE},
                ],
            },
            {"role": "system", "content": "The following skills are available: none."},
        ],
        "tools": _TOOLS,
        "max_tokens": 32000,
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "metadata": {"user_id": '{"device_id": "d", "session_id": "s"}'},
        "stream": True,
    }


HEADERS = {
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,unheard-of-2031-01-01",
    "x-api-key": "x",
    "x-app": "cli",
    "user-agent": "claude-cli/2.1 (external, cli)",
    "accept-encoding": "gzip, deflate, br, zstd",
}
