"""Models by Ollama's names, in which NAME and NAME:latest are the same."""

from __future__ import annotations

from millrace.errors import ModelNotFound
from millrace.serving.model import ServedModel
from millrace.serving.registry import Registry

_LATEST = ":latest"


def find(registry: Registry, name: str | None) -> ServedModel:
    try:
        return registry.get(name)
    except ModelNotFound:
        if name is None or not name.endswith(_LATEST):
            raise
        return registry.get(bare(name))


def bare(name: str) -> str:
    return name.removesuffix(_LATEST)


def tagged(name: str) -> str:
    """As lists tell it: Ollama's clients look for a tag."""
    return name if ":" in name else f"{name}{_LATEST}"
