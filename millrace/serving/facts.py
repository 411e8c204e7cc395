"""What a model's files tell of it before it is loaded, or what is wrong with them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from millrace.errors import MillraceError
from millrace.models.description import ModelDescription, inspect
from millrace.models.encoders import encoder_in
from millrace.models.window import read_config, window_of
from millrace.serving.capability import Makes, makes
from millrace.serving.catalogue import ModelSpec
from millrace.serving.sampling_defaults import shown_defaults


@dataclass(frozen=True)
class SpecFacts:
    about: ModelDescription | None = None
    window: int | None = None
    makes: Makes | None = None
    defaults: dict[str, Any] = field(default_factory=dict)
    """The sampling of a request that sets none; empty for a model that makes no text."""
    error: str | None = None
    """Why it cannot be loaded; None where its files are sound."""


UNKNOWN = SpecFacts()


def facts_of(spec: ModelSpec) -> SpecFacts:
    """Reads the disk: not for the event loop."""
    found = inspect(spec.folder)
    if found.error is not None:
        return SpecFacts(error=found.error)
    try:
        encoder = encoder_in(spec.engine)
        window = encoder.length if encoder else None
        if window is None:
            window = window_of(read_config(spec.folder), spec.engine.context)
        defaults = {} if encoder else shown_defaults(spec.folder, spec.defaults)
        return SpecFacts(found.about, window, makes(encoder), defaults)
    except MillraceError as error:
        return SpecFacts(error=error.message)
