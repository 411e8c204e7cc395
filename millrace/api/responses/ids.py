"""Ids as this protocol writes them: a prefix that tells what it is, and enough chance to be safe."""

from __future__ import annotations

import secrets

_PREFIXES = {
    "message": "msg_",
    "reasoning": "rs_",
    "function_call": "fc_",
    "function_call_output": "fco_",
    "custom_tool_call": "ctc_",
    "custom_tool_call_output": "ctco_",
    "additional_tools": "at_",
    "compaction": "cmp_",
}

OWNER_LENGTH = 16
"""Characters at the end of an id that say whose it is: the id of an API key."""
_NOBODY = "0" * OWNER_LENGTH


def fresh(prefix: str, caller: str = "") -> str:
    """An id that ends with whose it is; `caller` is empty on a server without keys."""
    return f"{prefix}{secrets.token_hex(16)}{owner(caller)}"


def owner(caller: str) -> str:
    return caller or _NOBODY


def belongs(id: str, caller: str) -> bool:
    return id.endswith(owner(caller))


def item_id(type: str) -> str:
    return fresh(_PREFIXES[type])
