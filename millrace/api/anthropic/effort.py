"""Anthropic's levels of effort in the words of a model's own template."""

from __future__ import annotations

from typing import Any

from millrace.errors import BadRequest, ModelError
from millrace.text.dialect import Dialect

_LEVELS = ("low", "medium", "high", "xhigh", "max")
_RARE = ("xhigh", "max")


def effort_word(dialect: Dialect, wish: str) -> str:
    """The level nearest to the wish that the template takes; the higher one of two."""
    at = _LEVELS.index(wish)
    nearest = sorted(_LEVELS, key=lambda level: abs(_LEVELS.index(level) - at - 0.1))
    return next((level for level in nearest if _takes(dialect, level)), wish)


def _takes(dialect: Dialect, level: str) -> bool:
    """Templates that know certain words only refuse the others; some print any word they get,
    and models behind those have seen no more than the common three.
    """
    source = dialect.template.source
    if level in _RARE and f"'{level}'" not in source and f'"{level}"' not in source:
        return False
    arguments: dict[str, Any] = dialect.controls.arguments(True, level)
    try:
        dialect.template.render([{"role": "user", "content": "?"}], **arguments)
    except (BadRequest, ModelError):
        return False
    return True
