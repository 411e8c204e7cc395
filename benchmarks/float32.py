"""Writes a float32 copy of an MLX model folder: `python float32.py FROM TO`.

Scales and biases are widened before the weights are dequantised, so that the copy holds the
quantised values exactly and not their half-precision rounding.
"""

from __future__ import annotations

import sys
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.utils import dequantize_model, load, save


def widen(value: mx.array) -> mx.array:
    return value.astype(mx.float32) if mx.issubdtype(value.dtype, mx.floating) else value


def main() -> None:
    source, target = Path(sys.argv[1]), Path(sys.argv[2])
    model, tokenizer, config = load(str(source), lazy=True, return_config=True)
    model.update(tree_map(widen, model.parameters()))
    model = dequantize_model(model)
    for key in ("quantization", "quantization_config"):
        config.pop(key, None)
    for key in ("torch_dtype", "dtype"):
        if key in config:
            config[key] = "float32"
    save(target, source, model, tokenizer, config)


if __name__ == "__main__":
    main()
