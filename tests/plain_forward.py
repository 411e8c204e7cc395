"""Log-probabilities by a plain forward pass: `python plain_forward.py MODEL OUT < token lists`.

Reads a JSON list of token lists, writes one (length, vocabulary) table each into OUT.npz. A process
of its own, since the BLAS must be chosen before anything imports MLX.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from millrace.models import blas


def main() -> None:
    blas.prepare()
    import mlx.core as mx
    import numpy as np
    from mlx_lm.utils import load_model

    from millrace.models.placement import place

    mx.set_default_device(mx.cpu)
    model, _ = load_model(Path(sys.argv[1]), lazy=True)
    place(model, "f32", "cpu")
    tables = []
    for tokens in json.load(sys.stdin):
        logits = model(mx.array([tokens], mx.int32))[0].astype(mx.float32)
        tables.append(np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True)))
    np.savez(sys.argv[2], *tables)


if __name__ == "__main__":
    main()
