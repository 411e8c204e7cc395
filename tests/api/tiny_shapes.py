"""Model folders of the tiny shapes, with the default model's tokenizer: hybrids over HTTP."""

from __future__ import annotations

import importlib
from pathlib import Path

from api import tiny_folder
from tiny import _BASE, SHAPES

_REAL = {
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "eos_token_id": [2, 0],
}


def make(folder: Path, tokenizer_of: Path, shape: str, seed: int = 0) -> Path:
    """Write the model into `folder`; the same weights for the same seed."""
    import mlx.core as mx

    config = _BASE | {"model_type": shape} | SHAPES[shape] | _REAL
    module = importlib.import_module(f"mlx_lm.models.{shape}")
    mx.random.seed(seed)
    model = module.Model(module.ModelArgs.from_dict(config))
    return tiny_folder.write(folder, tokenizer_of, model, config)
