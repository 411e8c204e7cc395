"""Models by Ollama's names, in which NAME and NAME:latest are the same."""

from __future__ import annotations

from millrace.api.leases import LATEST


def bare(name: str) -> str:
    return name.removesuffix(LATEST)


def tagged(name: str) -> str:
    """As lists tell it: Ollama's clients look for a tag."""
    return name if ":" in name else f"{name}{LATEST}"
