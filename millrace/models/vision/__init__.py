"""Vision-language models: which folders are one, and how mlx-vlm's classes are driven.

`families` says what is known of each kind without MLX, so that the front may ask; `load` and `model` are
the engine's.
"""

from __future__ import annotations
