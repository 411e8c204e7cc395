"""The kinds of vision-language models that are proven, and what is known of each from its files alone.

The front uses this as well: no MLX here. A folder whose kind is not proven is served as a text model where
mlx-lm knows its text tower, and refused where it does not.
"""

from __future__ import annotations

import importlib.util
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millrace.errors import ModelError
from millrace.models.files import reads_folder
from millrace.models.mlx_lm_kinds import has_class
from millrace.models.window import is_candidate, read_config

log = logging.getLogger("millrace.models")


@dataclass(frozen=True)
class Family:
    name: str
    """What its makers call it."""
    model_type: str
    """As its config.json spells it, and mlx-vlm names the module of its classes."""
    grids: bool = False
    """A token is placed by three numbers, which for a picture follow from its grid of patches."""
    deep: bool = False
    """Pictures are also seen by the first layers of the text tower, each by what another layer of the
    vision tower gave."""
    placeholder: str = ""
    """What stands for a picture in a prompt's text, where that is not the token of its features."""
    moving: bool = False
    """Videos are taken as well, and placed by the same three numbers."""
    texts: frozenset[str] = frozenset()
    """The kinds of text towers that are proven; all that mlx-vlm has for it, if empty."""

    def proven(self, settings: dict[str, Any]) -> bool:
        """Whether a model of this family is of the kind that was tested."""
        text = settings.get("text_config") or {}
        return not self.texts or text.get("model_type", "mistral") in self.texts


_MISTRAL = frozenset({"mistral"})

FAMILIES: tuple[Family, ...] = (
    Family("Qwen2-VL", "qwen2_vl", grids=True, moving=True),
    Family("Qwen2.5-VL", "qwen2_5_vl", grids=True, moving=True),
    Family("Qwen3-VL", "qwen3_vl", grids=True, deep=True),
    Family("Gemma 3", "gemma3", placeholder="<start_of_image>"),
    Family("Gemma 4", "gemma4"),
    Family("Idefics 3", "idefics3"),
    Family("SmolVLM", "smolvlm"),
    Family("LLaVA", "llava"),
    Family("Pixtral", "pixtral", texts=_MISTRAL),
    Family("Mistral 3", "mistral3", texts=_MISTRAL),
    Family("InternVL", "internvl"),
    Family("InternVL-Chat", "internvl_chat", placeholder="<image>"),
)
"""The proven ones; tests/models/test_vision_families.py holds docs/vision-models.md to them."""

_BY_TYPE = {family.model_type: family for family in FAMILIES}
_LEAST_ROOM, _MOST_ROOM = 64 << 20, 1 << 30
_IMAGE_TOKEN = ("image_token_id", "image_token_index")


@reads_folder
def vision_in(folder: Path) -> Family | None:
    """What a folder's model is, if it takes pictures here; None for a text model.

    Raises ModelError where nothing here can run it.
    """
    return family_of(read_config(folder), folder) if is_candidate(folder) else None


def family_of(settings: dict[str, Any], folder: Path | None = None) -> Family | None:
    kind = settings.get("model_type")
    if not isinstance(kind, str) or not sees(settings):
        return None
    family = _BY_TYPE[kind.lower()] if is_proven(settings) else None
    text = has_class(kind)
    if family is None:
        if text:
            log.warning("pictures are refused: models of the kind %s are served as text only", kind)
            return None
        known = ", ".join(f.name for f in FAMILIES)
        raise ModelError(
            f"The model{f' in {folder}' if folder else ''} is a vision model of the kind '{kind}', which "
            f"is not proven here. Proven are: {known}."
        )
    if importlib.util.find_spec("mlx_vlm") is None:
        if text:
            log.warning(
                "pictures are refused: mlx-vlm is not installed (docs/vision-models.md says how)"
            )
            return None
        raise ModelError(
            f"{family.name} needs mlx-vlm, which is not installed: pip install 'millrace-server[vision]' "
            "and pip install --no-deps mlx-vlm==0.7.10."
        )
    if "model_file" in settings:
        raise ModelError("A vision model that brings its own code (model_file) is not loaded.")
    return family


def sees(settings: dict[str, Any]) -> bool:
    """Whether a configuration has a vision tower."""
    return isinstance(settings.get("vision_config"), dict)


def is_proven(settings: dict[str, Any]) -> bool:
    """Whether a model is run with its vision tower here; others that have one are served as text only."""
    kind = settings.get("model_type")
    family = _BY_TYPE.get(kind.lower()) if isinstance(kind, str) and sees(settings) else None
    return family is not None and family.proven(settings)


def image_token(settings: dict[str, Any]) -> int | None:
    """The placeholder of a picture's features, where the configuration names it."""
    return next((t for key in _IMAGE_TOKEN if isinstance(t := settings.get(key), int)), None)


def picture_room(state: int) -> int:
    """Bytes for the features of pictures, of so many for state: a twentieth, within bounds."""
    return max(1, min(_MOST_ROOM, max(min(_LEAST_ROOM, state // 8), state // 20)))


def merge_size(settings: dict[str, Any]) -> int:
    """Patches of a grid's side that become one token."""
    found = (settings.get("vision_config") or {}).get("spatial_merge_size", 2)
    return found if isinstance(found, int) and found > 0 else 2
