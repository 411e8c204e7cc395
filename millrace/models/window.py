"""The context window of a model folder: its own, or the one that was asked for."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from millrace.errors import ModelError
from millrace.models.checked import MOST_WINDOW, check_config
from millrace.models.files import read_json, reads_folder

log = logging.getLogger("millrace.models")

_KEYS = ("max_position_embeddings", "model_max_length", "max_seq_len", "n_positions", "seq_length")
_UNSTATED = 4096


def is_candidate(folder: Path) -> bool:
    """Whether something called config.json lies in a folder, sound or not: it is meant to be a model."""
    try:
        return os.path.lexists(folder / "config.json") and os.path.isdir(folder)
    except ValueError:  # no folder has such a name
        return False


@reads_folder
def read_config(folder: Path) -> dict[str, Any]:
    """A folder's config.json, with the fields that loading is steered by checked."""
    file = folder / "config.json"
    if not os.path.isdir(folder):
        raise ModelError(f"The model folder {folder} is missing.")
    if not os.path.lexists(file):
        raise ModelError(f"{folder} has no config.json: it is not a model folder.")
    config = read_json(file)
    check_config(config, file)
    return config


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
            value = source.get(key)
            # Some files write a number beyond all windows where no limit is set.
            if isinstance(value, int) and 0 < value <= MOST_WINDOW:
                return value
    return _UNSTATED
