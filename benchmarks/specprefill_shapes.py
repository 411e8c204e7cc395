"""SpecPrefill on a GPU: time to the first token of a long prompt, dense and with shares of it, by an engine
with random weights in the shape of Qwen3-8B and a draft in that of Qwen3-0.6B.

What random weights choose means nothing, and what it takes is the same. Each prompt has tokens of its own.
No round begins after `--seconds`; medians are printed as a table for docs/specprefill.md.
`python benchmarks/specprefill_shapes.py [--small] [--tokens 32000] [--keep 0.1 0.2 0.3] [--json FILE]`
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from millrace.models import blas, device

device.before_import()
blas.prepare()

import mlx.core as mx  # noqa: E402
import numpy as np  # noqa: E402
from mlx.utils import tree_map  # noqa: E402
from mlx_lm.models import qwen3  # noqa: E402
from mlx_lm.models.cache import make_prompt_cache  # noqa: E402

from millrace.config import EngineConfig  # noqa: E402
from millrace.engine.assembly import assemble  # noqa: E402
from millrace.engine.memory import Budget  # noqa: E402
from millrace.engine.runner import Runner  # noqa: E402
from millrace.engine.sampler import Sampler  # noqa: E402
from millrace.engine.sampling import DeviceSampling, HostSampling  # noqa: E402
from millrace.engine.specprefill.draft import DraftModel  # noqa: E402
from millrace.engine.transport import ThreadTransport  # noqa: E402
from millrace.engine.warmup import warm_up, warm_up_draft  # noqa: E402
from millrace.protocol import Choice, FromEngine, Sampling, Step, Submit  # noqa: E402
from millrace.protocol.specprefill import Selected, SparsePrefill  # noqa: E402

SHARED = {
    "model_type": "qwen3",
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}
LARGE = {"hidden_size": 4096, "num_hidden_layers": 36, "intermediate_size": 12288}
LARGE |= {"num_attention_heads": 32}
SMALL = {"hidden_size": 1024, "num_hidden_layers": 28, "intermediate_size": 3072}
SMALL |= {"num_attention_heads": 16}
TINY = {"num_hidden_layers": 2, "vocab_size": 2048}


def model(shape: dict[str, Any], *, tiny: bool) -> Any:
    settings = SHARED | shape | (TINY if tiny else {})
    found = qwen3.Model(qwen3.ModelArgs.from_dict(settings))
    kind = mx.float32 if tiny else mx.bfloat16
    found.update(
        tree_map(lambda x: (0.02 * mx.random.normal(x.shape)).astype(kind), found.parameters())
    )
    mx.eval(found.parameters())
    return found


class Prompts:
    """An engine with a draft, and when first tokens came."""

    def __init__(self, *, tiny: bool, tokens: int) -> None:
        on_cpu = mx.default_device() == mx.cpu
        chunk = 512 if on_cpu else 2048
        target, small = model(LARGE if not tiny else SMALL, tiny=tiny), model(SMALL, tiny=tiny)
        used = make_prompt_cache(small)
        mx.eval(small(mx.array([[0]], mx.int32), cache=used))
        draft = DraftModel(
            small, used, target=target, chunk=chunk, room=64 << 30, cached=0, recurring=not on_cpu
        )
        runner = Runner(target, recurring=not on_cpu)
        backend = HostSampling() if on_cpu else DeviceSampling()
        if not on_cpu:
            warm_up_draft(draft.runner, chunk)
            warm_up(runner, Sampler(backend), 4, chunk)
        self.transport = ThreadTransport(self._hear)
        self.selected: dict[int, Selected] = {}
        self.first: dict[int, float] = {}
        self._vocabulary = (SHARED | (TINY if tiny else {}))["vocab_size"]
        self._tokens = tokens
        self._dice = np.random.default_rng(0)
        self.engine = assemble(
            runner,
            EngineConfig(model="random", name="random", max_running=4, prefill_chunk=chunk),
            Sampler(backend),
            Budget(runner.cost, 64 << 30),
            self.transport,
            pipelined=not on_cpu,
            draft=draft,
        )

    def run(self, id: int, sparse: SparsePrefill | None) -> dict[str, float]:
        prompt = self._dice.integers(3, self._vocabulary, self._tokens).tolist()
        begin = time.perf_counter()
        choices = [Choice(0, 0)]
        self.transport.put(Submit(id, prompt, choices, 1, Sampling(0.0), sparse=sparse))
        self.engine.turn()
        while self.engine.busy:
            self.engine.turn()
        found = {"seconds": self.first[id] - begin}
        if chosen := self.selected.get(id):
            kept = sum(b - a for a, b in chosen.kept)
            found |= {"scoring": chosen.seconds, "kept": kept}
        return found

    def _hear(self, message: FromEngine) -> None:
        if isinstance(message, Step):
            for row in message.rows:
                self.first.setdefault(row.id, time.perf_counter())
            self.selected |= {s.id: s for s in message.selected}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--tokens", type=int, default=32_000)
    parser.add_argument("--keep", type=float, nargs="*", default=[0.1, 0.2, 0.3])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    begin = time.perf_counter()
    prompts = Prompts(tiny=asked.small, tokens=asked.tokens)
    print(f"ready after {time.perf_counter() - begin:.1f} s", flush=True)
    results: dict[str, list[dict[str, float]]] = {}
    for number in range(asked.rounds):
        if number and time.perf_counter() - begin > asked.seconds:
            break
        ways = [("dense", None), *((f"keep {k:g}", SparsePrefill(k)) for k in asked.keep)]
        for way, (name, sparse) in enumerate(ways):
            found = prompts.run(100 * number + way + 1, sparse)
            results.setdefault(name, []).append(found)
            said = ", ".join(f"{key} {value:.3f}" for key, value in found.items())
            print(f"round {number + 1}, {name}: {said}", flush=True)
    if asked.json is not None:
        asked.json.write_text(json.dumps(results, indent=1))
    print(table(results, asked.tokens), flush=True)


def table(results: dict[str, list[dict[str, float]]], tokens: int) -> str:
    """In Markdown. The first round compiles kernels: where there are more, it does not count."""

    def median(name: str, key: str) -> float:
        found = results[name]
        return statistics.median(r.get(key, 0.0) for r in (found[1:] or found))

    dense = median("dense", "seconds")
    lines = [
        "| | tokens run | scoring, s | first token, s | over dense |",
        "|---|---|---|---|---|",
        f"| dense | {tokens:,} | | {dense:.2f} | 1 |",
    ]
    for name in list(results)[1:]:
        seconds = median(name, "seconds")
        kept, scoring = int(median(name, "kept")) or tokens, median(name, "scoring")
        lines.append(
            f"| {name} | {kept:,} | {scoring:.2f} | {seconds:.2f} | {seconds / dense:.2f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
