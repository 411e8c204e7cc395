"""What a model gives, text or numbers, held against what a request wants of it.

Its files tell: one that gives something else is not loaded for the request.
"""

from __future__ import annotations

from typing import Literal

from millrace.errors import BadRequest
from millrace.models.encoders import Encoder

Gives = Literal["text", "numbers"]


def check_gives(name: str, encoder: Encoder | None, wanted: Gives | None) -> None:
    """Raise that a model, an encoder or none, gives something else than what is wanted."""
    if wanted == "numbers" and encoder is None:
        raise BadRequest(
            f"The model '{name}' makes text, and no embeddings or scores. Serve a model that does, or "
            f"this one with --embed.",
            param="model",
        )
    if wanted == "text" and encoder is not None:
        what = "embeddings" if encoder.kind == "embed" else "scores"
        raise BadRequest(f"The model '{name}' makes {what}, and no text.", param="model")
