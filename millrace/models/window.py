"""The context window of a model folder: its own, or the one that was asked for."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from millrace.errors import ModelError
from millrace.models.files import read_json

log = logging.getLogger("millrace.models")

_KEYS = ("max_position_embeddings", "model_max_length", "max_seq_len", "n_positions", "seq_length")
_UNSTATED = 4096


def read_config(folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    if not file.is_file():
        raise ModelError(f"{folder} has no config.json: it is not a model folder.")
    return read_json(file)


def window_of(settings: dict[str, Any], wanted: int | None = None) -> int:
    own = _native(settings)
    if wanted is None:
        return own
    if wanted > own:
        log.warning(
            "--context %d is beyond the model's own window of %d tokens: answers may degrade",
            wanted,
            own,
        )
    return wanted


def _native(settings: dict[str, Any]) -> int:
    for source in (settings, settings.get("text_config") or {}):
        for key in _KEYS:
            if isinstance(source.get(key), int):
                return int(source[key])
    return _UNSTATED
