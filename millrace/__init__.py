"""millrace: an LLM inference server on MLX. `from millrace import LLM` is the Python API."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from millrace.version import __version__

__all__ = ["LLM", "__version__", "parse_tool_calls", "split_reasoning"]

if TYPE_CHECKING:
    from millrace.llm import LLM
    from millrace.text.reading import parse_tool_calls, split_reasoning


def __getattr__(name: str) -> Any:
    # Imported on first use, so that `import millrace` costs nothing in the front process.
    if name == "LLM":
        from millrace.llm import LLM

        return LLM
    if name in ("parse_tool_calls", "split_reasoning"):
        from millrace.text import reading

        return getattr(reading, name)
    raise AttributeError(f"module 'millrace' has no attribute {name!r}")
