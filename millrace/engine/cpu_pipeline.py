"""A chunk of a prompt on all cores of a CPU.

Much of a forward pass there is work on one core: all that is no matrix product. So a chunk is cut into
pieces, a lane for each. Of the pieces before it, a piece needs what they leave in a layer's cache and
nothing else: the lanes go through the layers one shortly behind the other, and none of them waits.

    lane 1   layer 1   layer 2   layer 3   …
    lane 2      layer 1   layer 2   layer 3   …
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from millrace.engine.runner import whole
from millrace.models import blas

LEAST_PIECE = 24
"""Tokens of a lane below which reading the weights twice takes more than the cores give."""
MOST_PIECE = 256
"""Attention also computes what the causal mask hides: piece by piece that is less."""


class CpuPipeline:
    def __init__(self, cores: int) -> None:
        self._streams = [mx.new_stream(mx.cpu) for _ in range(cores)]

    def forward(self, model: Any, chunk: mx.array, caches: list[Any]) -> mx.array:
        """Run a chunk to its end, unless it is too short to be cut; logits wait to be asked for."""
        count = chunk.shape[1]
        lanes = min(len(self._streams), count // LEAST_PIECE)
        if lanes < 2:
            return whole(model, chunk, caches)
        piece = min(MOST_PIECE, -(-count // lanes))
        logits = []
        with blas.one_thread():
            for n, start in enumerate(range(0, count, piece)):
                with mx.stream(self._streams[n % lanes]):
                    logits.append(model(chunk[:, start : start + piece], cache=caches))
            # All at once: MLX launches little more than it can run, so one by one would wait.
            mx.eval([c.state for c in caches])
        return mx.concatenate(logits, axis=1)
