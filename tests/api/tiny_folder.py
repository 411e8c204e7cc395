"""A model folder for load tests: random weights of a tiny llama, the default model's tokenizer.

It decodes hundreds of tokens a second, so that hundreds of requests are no long test.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

WINDOW = 8192
_CONFIG = {
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "vocab_size": 49152,
    "max_position_embeddings": WINDOW,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": [2, 0],
}


def make(folder: Path, tokenizer_of: Path, **changes: Any) -> Path:
    """Write the model into `folder`; the same weights every time. Changes are the config's."""
    import mlx.core as mx
    from mlx_lm.models import llama

    config = _CONFIG | changes
    mx.random.seed(0)
    return write(folder, tokenizer_of, llama.Model(llama.ModelArgs.from_dict(config)), config)


def write(folder: Path, tokenizer_of: Path, model: Any, config: dict[str, Any]) -> Path:
    """A model's folder, with another's tokenizer."""
    import mlx.core as mx
    from mlx.utils import tree_flatten

    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(
        str(folder / "model.safetensors"),
        dict(tree_flatten(model.parameters())),
        metadata={"format": "mlx"},
    )
    (folder / "config.json").write_text(json.dumps(config))
    for file in tokenizer_of.glob("tokenizer*.json"):
        shutil.copy(file, folder)
    return folder
