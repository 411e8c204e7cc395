"""What 8-bit storage of cached state costs in accuracy, on real text: a child of prefix.py.

The state of a prefix is packed and unpacked as the cache does, and the text that follows is scored on
it and on the state as it was. Prints one line of JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from millrace.models import blas

blas.prepare()  # before MLX is imported

import mlx.core as mx  # noqa: E402
from mlx_lm.models.cache import make_prompt_cache  # noqa: E402

from millrace.cache.state import (  # noqa: E402
    Layout,
    checkpoint_of,
    restore_checkpoint,
    restore_segments,
    segment_of,
)
from millrace.config import EngineConfig  # noqa: E402
from millrace.models.load import load  # noqa: E402
from millrace.text.tokenizer import Tokenizer  # noqa: E402


def main() -> None:
    folder, file, count, prefix, scored = sys.argv[1:6]
    model = load(EngineConfig(model=folder, name="quant")).model
    tokens = Tokenizer(Path(folder)).encode(Path(file).read_text(encoding="utf-8"))
    length = int(prefix) + int(scored) + 1
    step = (len(tokens) - length) // int(count)
    runs = [tokens[i * step : i * step + length] for i in range(int(count))]
    print(json.dumps(_compare(model, runs, int(prefix))))


def _compare(model: Any, runs: list[list[int]], prefix: int) -> dict[str, float]:
    layout = Layout.of(model)
    differences: list[mx.array] = []
    exact: list[mx.array] = []
    packed: list[mx.array] = []
    agree: list[mx.array] = []
    sizes = [0, 0]
    for run in runs:
        caches = make_prompt_cache(model)
        for at in range(0, prefix, 256):
            model(mx.array([run[at : min(prefix, at + 256)]]), cache=caches)
            mx.eval([c.state for c in caches])
        state = checkpoint_of(layout, caches) if layout.rest else None
        scores = []
        for pack in (False, True):
            kept = [caches[i] for i in layout.cuttable]
            pairs = [(c.keys[:, :, :prefix], c.values[:, :, :prefix]) for c in kept]
            segment = segment_of(pairs, prefix, pack)
            sizes[pack] += segment.nbytes
            again = make_prompt_cache(model)
            restore_segments(again, layout, [segment], prefix)
            if state is not None:
                restore_checkpoint(again, layout, state, prefix, prefix)
            logits = model(mx.array([run[prefix:-1]]), cache=again)[0].astype(mx.float32)
            scores.append(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
        follow = mx.array(run[prefix + 1 :])[:, None]
        plain, small = (mx.take_along_axis(s, follow, axis=-1)[:, 0] for s in scores)
        differences.append(mx.abs(plain - small))
        exact.append(plain)
        packed.append(small)
        agree.append(mx.argmax(scores[0], axis=-1) == mx.argmax(scores[1], axis=-1))
        mx.eval(differences, exact, packed, agree)
    apart = mx.sort(mx.concatenate(differences))
    return {
        "passages": len(runs),
        "scored_tokens": apart.size,
        "mean": mx.mean(apart).item(),
        "p99": apart[int(0.99 * (apart.size - 1))].item(),
        "max": apart[-1].item(),
        "perplexity": mx.exp(-mx.mean(mx.concatenate(exact))).item(),
        "perplexity_packed": mx.exp(-mx.mean(mx.concatenate(packed))).item(),
        "same_first_choice": mx.mean(mx.concatenate(agree).astype(mx.float32)).item(),
        "bytes_per_token": sizes[0] / len(runs) / prefix,
        "bytes_per_token_packed": sizes[1] / len(runs) / prefix,
    }


if __name__ == "__main__":
    main()
