"""The sampling of a request that sets none: the server's defaults, else what the model's authors advise."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from millrace.models.files import read_json
from millrace.serving.request import SamplingRanges, in_range

_RECOMMENDED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Fields of generation_config.json that requests have too."""


def sampling_defaults(folder: Path, configured: Mapping[str, float]) -> dict[str, Any]:
    """The temperature, and the fields that are set by the server or recommended.

    A recommended value out of range is left out: the model's users did not choose it.
    """
    settings = read_json(folder / "generation_config.json", optional=True)
    recommended = {k: settings[k] for k in _RECOMMENDED if in_range(k, settings.get(k))}
    own = {k: v for k, v in configured.items() if k in SamplingRanges.__struct_fields__}
    return {"temperature": 1.0} | recommended | own


def shown_defaults(folder: Path, configured: Mapping[str, float]) -> dict[str, Any]:
    """What settings of a chat show: every field with its value, and the limit of an answer's tokens.

    A limit of None is what the prompt leaves of the context window.
    """
    found = sampling_defaults(folder, configured)
    neutral = SamplingRanges()
    limit = configured.get("max_tokens")
    return {name: found.get(name, getattr(neutral, name)) for name in _RECOMMENDED} | {
        "max_tokens": None if limit is None else int(limit)
    }
