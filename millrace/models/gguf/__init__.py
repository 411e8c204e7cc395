"""GGUF files as model sources: read, checked, and written out as ordinary MLX model folders.

Nothing here imports MLX; weights pass through numpy, and `gguf` says how each type is laid out.
"""

from __future__ import annotations

from millrace.models.gguf.convert import convert
from millrace.models.gguf.reader import GGUF, Tensor, open_gguf

__all__ = ["GGUF", "Tensor", "convert", "open_gguf"]
