"""Which kinds of models (`model_type`) the installed mlx-lm has a class for, found without importing MLX.

Its files are looked at: to look for a module of a package imports the package, and MLX with it.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
from pathlib import Path

_REMAPPING = "MODEL_REMAPPING"
"""What mlx-lm calls its table of architectures that are others under a new name."""
_FILE_NAME = re.compile(r"[A-Za-z0-9_-]+")
"""The names of files that mlx-lm can import: some have hyphens."""


def has_class(kind: str) -> bool | None:
    """Whether mlx-lm has a class for models of a kind; None where mlx-lm is not installed."""
    package = _package()
    if package is None:
        return None
    name = _remapped(package).get(kind, kind)
    return bool(_FILE_NAME.fullmatch(name)) and (package / "models" / f"{name}.py").is_file()


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
