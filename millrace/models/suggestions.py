"""Models that suit machines of different sizes: a table, and which of them fit into a given memory.

Sizes are those of 4-bit MLX weights in autumn 2026. A table ages; nothing but advice depends on it.
"""

from __future__ import annotations

import msgspec

_GB = 10**9
_BESIDE = 15 * _GB // 10
"""What a model needs beside its weights to be of use: its process, and state for some thousand tokens."""


class Suggestion(msgspec.Struct, frozen=True):
    name: str
    bytes: int
    good_for: str
    source: str
    """Where it is to be had, as far as is known."""


def _all() -> tuple[Suggestion, ...]:
    table = (
        ("LFM2.5-2.6B", 1.6, "chat"),
        ("Qwen3.5-4B", 3.1, "chat, tools"),
        ("gemma-4-e4b", 5.2, "chat, pictures"),
        ("Qwen3-VL-8B", 5.8, "pictures"),
        ("Qwen3.5-9B", 6.0, "chat, tools"),
        ("gpt-oss-20b", 12.1, "thinking, tools"),
        ("gemma-4-26b-a4b", 15.4, "chat, pictures"),
        ("Qwen3.8-27B", 16.3, "chat, tools"),
        ("GLM-4.7-Flash", 16.9, "code, tools"),
        ("Qwen3-Coder-30B", 17.2, "code"),
        ("Qwen3.6-35B-A3B", 20.4, "chat, tools"),
        ("Qwen3-Coder-Next", 44.9, "code"),
        ("GLM-4.5-Air", 60.2, "code, tools"),
        ("gpt-oss-120b", 63.4, "thinking, tools"),
        ("Qwen3.8-Flash-Next", 104.7, "chat, tools"),
        ("MiniMax-M2.7", 121.5, "code, tools"),
        ("DeepSeek-V4-Flash", 151.5, "chat, code"),
        ("GLM-5.3-Flash", 181.7, "chat, code"),
        ("embeddinggemma-300m", 0.37, "embeddings"),
        ("bge-m3", 0.32, "embeddings"),
        ("Qwen3-Embedding-4B", 4.0, "embeddings"),
    )
    return tuple(
        Suggestion(name, int(size * _GB), purpose, f"mlx-community/{name}-4bit")
        for name, size, purpose in table
    )


SUGGESTIONS = _all()


def need(suggestion: Suggestion) -> int:
    """Bytes that it takes while it is served, about."""
    return suggestion.bytes + suggestion.bytes // 10 + _BESIDE


def fitting(memory: int) -> list[Suggestion]:
    """Those that fit, the largest first."""
    return sorted((s for s in SUGGESTIONS if need(s) <= memory), key=lambda s: -s.bytes)
