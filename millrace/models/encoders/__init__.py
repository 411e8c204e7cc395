"""Models that turn a text into numbers: embeddings, relevance and classes.

`facts` reads from a folder what such a model is and how it wants to be asked, and is the front's as
well; everything else here runs on MLX and is the engine's.
"""

from __future__ import annotations

from millrace.models.encoders.facts import Encoder, encoder_in, encoder_of

__all__ = ["Encoder", "encoder_in", "encoder_of"]
