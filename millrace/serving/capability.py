"""What a model gives, text or numbers, held against what a request wants of it.

Its files tell: one that gives something else is not loaded for the request.
"""

from __future__ import annotations

from typing import Literal

from millrace.errors import BadRequest
from millrace.models.encoders import Encoder

Gives = Literal["text", "numbers"]
Makes = Literal["text", "embeddings", "scores"]


def makes(encoder: Encoder | None) -> Makes:
    """What a model, an encoder or none, answers with."""
    if encoder is None:
        return "text"
    return "embeddings" if encoder.kind == "embed" else "scores"


def check_gives(name: str, encoder: Encoder | None, wanted: Gives | None) -> None:
    """Raise that a model, an encoder or none, gives something else than what is wanted."""
    if wanted == "numbers" and encoder is None:
        raise BadRequest(
            f"The model '{name}' makes text, and no embeddings or scores. Serve a model that does, or "
            f"this one with --embed.",
            param="model",
        )
    if wanted == "text" and encoder is not None:
        raise BadRequest(f"The model '{name}' makes {makes(encoder)}, and no text.", param="model")
