"""Whether there is a model class for what lies in a folder, told without importing MLX.

The classes are mlx-lm's, those of vision models mlx-vlm's, and those of encoders our own.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
from pathlib import Path

from millrace.models.encoders import encoder_of
from millrace.models.encoders.facts import ENCODERS
from millrace.models.files import reads_folder
from millrace.models.vision.families import FAMILIES, sees
from millrace.models.window import read_config

_REMAPPING = "MODEL_REMAPPING"
"""What mlx-lm calls its table of architectures that are others under a new name."""


@reads_folder
def is_supported(folder: Path) -> bool | None:
    """None where mlx-lm is not installed, so that nobody knows."""
    config = read_config(folder)
    if "model_file" in config or sees(config) or encoder_of(folder, name=folder.name) is not None:
        return True
    return _has_class(str(config.get("model_type", "")))


def is_supported_kind(kind: str) -> bool | None:
    """The same of a `model_type` alone, whose files are not here; None where nobody knows."""
    if kind in ENCODERS or any(family.model_type == kind for family in FAMILIES):
        return True
    return _has_class(kind)


def _has_class(kind: str) -> bool | None:
    package = _package()
    if package is None:
        return None
    name = _remapped(package).get(kind, kind)
    return name.isidentifier() and (package / "models" / f"{name}.py").is_file()


def _package() -> Path | None:
    found = importlib.util.find_spec("mlx_lm")
    places = list(found.submodule_search_locations or ()) if found else []
    return Path(places[0]) if places else None


@functools.cache
def _remapped(package: Path) -> dict[str, str]:
    try:
        tree = ast.parse((package / "utils.py").read_text("utf-8"))
    except (OSError, ValueError, SyntaxError):
        return {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id == _REMAPPING for target in node.targets
        ):
            return dict(ast.literal_eval(node.value))
    return {}
