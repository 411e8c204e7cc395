"""Loading a vision-language model: mlx-vlm's class of its kind, behind the engine's interface."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from millrace.models.vision.families import Family, merge_size
from millrace.models.vision.model import VisionLanguageModel
from millrace.models.window import read_config


def load_vision(folder: Path, family: Family) -> tuple[VisionLanguageModel, dict[str, Any]]:
    """The model, its weights not read yet, and its settings."""
    from mlx_vlm.utils import load_model

    settings = read_config(folder)
    inner = load_model(folder, lazy=True)
    inner.eval()
    return VisionLanguageModel(inner, family, merge_size(settings)), settings
