"""Whether there is a model class for what lies in a folder, told without importing MLX.

The classes are mlx-lm's, those of vision models mlx-vlm's, and those of encoders our own.
"""

from __future__ import annotations

from pathlib import Path

from millrace.models.encoders import encoder_of
from millrace.models.encoders.facts import ENCODERS
from millrace.models.files import reads_folder
from millrace.models.mlx_lm_kinds import has_class
from millrace.models.vision.families import FAMILIES, sees
from millrace.models.window import read_config


@reads_folder
def is_supported(folder: Path) -> bool | None:
    """None where mlx-lm is not installed, so that nobody knows."""
    config = read_config(folder)
    if "model_file" in config or sees(config) or encoder_of(folder, name=folder.name) is not None:
        return True
    return has_class(str(config.get("model_type", "")))


def is_supported_kind(kind: str) -> bool | None:
    """The same of a `model_type` alone, whose files are not here; None where nobody knows."""
    if kind in ENCODERS or any(family.model_type == kind for family in FAMILIES):
        return True
    return has_class(kind)
