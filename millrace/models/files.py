"""Reading the JSON files of a model folder: one way, with errors that name the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from millrace.errors import ModelError


def read_json(file: Path, *, optional: bool = False) -> dict[str, Any]:
    """The JSON object in a file; an optional file that is not there is an empty one."""
    if optional and not file.is_file():
        return {}
    try:
        value = json.loads(file.read_bytes())
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise ModelError(f"{file} is not valid JSON: {error}. Fetch the model again.") from error
    if not isinstance(value, dict):
        raise ModelError(f"{file} should hold a JSON object. Fetch the model again.")
    return value
