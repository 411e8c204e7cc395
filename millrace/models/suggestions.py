"""Models that suit machines of different sizes: a table, and which of them fit into a given memory.

Sizes are those of 4-bit MLX weights in autumn 2026, and the names of repositories those under which public
code of that time loads them. A table ages; nothing but advice depends on it.
"""

from __future__ import annotations

import msgspec

from millrace.models.blas import mlx_backend

_GB = 10**9
_BESIDE = 15 * _GB // 10
"""What a model needs beside its weights to be of use: its process, and state for some thousand tokens."""
_WIDENED = 7
"""How much larger weights are on a CPU, where none of these is run by kernels of our own: float32 in place
of 4 bits and their scales."""


class Suggestion(msgspec.Struct, frozen=True):
    name: str
    bytes: int
    good_for: str
    source: str
    """Its repository on Hugging Face."""

    @property
    def uses(self) -> tuple[str, ...]:
        return tuple(self.good_for.split(", "))


def _all() -> tuple[Suggestion, ...]:
    table = (
        ("LFM2.5-2.6B", 1.6, "chat", "LFM2.5-2.6B-4bit"),
        ("Qwen3.5-4B", 3.1, "chat, tools", "Qwen3.5-4B-MLX-4bit"),
        ("gemma-4-e4b", 5.2, "chat, pictures", "gemma-4-e4b-it-4bit"),
        ("Qwen3-VL-8B", 5.8, "pictures", "Qwen3-VL-8B-Instruct-4bit"),
        ("Qwen3.5-9B", 6.0, "chat, tools", "Qwen3.5-9B-MLX-4bit"),
        ("gpt-oss-20b", 12.1, "thinking, tools", "gpt-oss-20b-MXFP4-Q8"),
        ("gemma-4-26b-a4b", 15.4, "chat, pictures", "gemma-4-26b-a4b-it-4bit"),
        ("Qwen3.8-27B", 16.3, "chat, tools", "Qwen3.8-27B-4bit"),
        ("GLM-4.7-Flash", 16.9, "code, tools", "GLM-4.7-Flash-4bit"),
        ("Qwen3-Coder-30B", 17.2, "code", "Qwen3-Coder-30B-A3B-Instruct-4bit"),
        ("Qwen3.6-35B-A3B", 20.4, "chat, tools", "Qwen3.6-35B-A3B-4bit"),
        ("Qwen3-Coder-Next", 44.9, "code", "Qwen3-Coder-Next-4bit"),
        ("GLM-4.5-Air", 60.2, "code, tools", "GLM-4.5-Air-4bit"),
        ("gpt-oss-120b", 63.4, "thinking, tools", "gpt-oss-120b-MXFP4-Q8"),
        ("Qwen3.8-Flash-Next", 104.7, "chat, tools", "Qwen3.8-Flash-Next-4bit"),
        ("MiniMax-M2.7", 121.5, "code, tools", "MiniMax-M2.7-4bit-mxfp4"),
        ("DeepSeek-V4-Flash", 151.5, "chat, code", "DeepSeek-V4-Flash-4bit"),
        ("GLM-5.3-Flash", 181.7, "chat, code", "GLM-5.3-Flash-4bit"),
        ("embeddinggemma-300m", 0.37, "embeddings", "embeddinggemma-300m-4bit"),
        ("bge-m3", 0.32, "embeddings", "bge-m3-mlx-4bit"),
        ("Qwen3-Embedding-4B", 4.0, "embeddings", "Qwen3-Embedding-4B-4bit-DWQ"),
    )
    return tuple(
        Suggestion(name, int(size * _GB), purpose, f"mlx-community/{repository}")
        for name, size, purpose, repository in table
    )


SUGGESTIONS = _all()


def need(suggestion: Suggestion) -> int:
    """Bytes that it takes while it is served, about."""
    on_cpu = mlx_backend() not in ("metal", "cuda")
    weights = suggestion.bytes * (_WIDENED if on_cpu else 1)
    return weights + weights // 10 + _BESIDE


def fitting(memory: int) -> list[Suggestion]:
    """Those that fit, the largest first."""
    return sorted((s for s in SUGGESTIONS if need(s) <= memory), key=lambda s: -s.bytes)
