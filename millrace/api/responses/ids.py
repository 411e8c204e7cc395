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
}


def fresh(prefix: str) -> str:
    return f"{prefix}{secrets.token_hex(24)}"


def item_id(type: str) -> str:
    return fresh(_PREFIXES[type])
