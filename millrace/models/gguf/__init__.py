"""GGUF files as model sources: read, checked, and written out as ordinary MLX model folders.

Nothing here imports MLX; weights pass through numpy, and `gguf` says how each type is laid out.
"""

from __future__ import annotations

from millrace.models.gguf.convert import convert
from millrace.models.gguf.reader import GGUF, GgufTensor, open_gguf

__all__ = ["GGUF", "GgufTensor", "convert", "open_gguf"]
