"""Our engine beside raw mlx-lm's BatchGenerator on one GPU, in one run.

Random weights in the shape of Qwen3-8B, bf16 and 4-bit; every row gets 512 tokens in and makes 128.
Nothing is downloaded. `python benchmarks/cuda.py [--rows 64] [--only bf16|4bit] [--mixed] [--small]`

MLX reads the sizes of its caches when it is imported: set them as the engine does (docs/platforms.md).
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map
from mlx_lm.generate import BatchGenerator
from mlx_lm.models import qwen3

from millrace.cache.index import PrefixIndex
from millrace.cache.state import measured_sizes
from millrace.cache.store import SegmentStore
from millrace.config import EngineConfig
from millrace.engine.assembly import assemble
from millrace.engine.memory import Budget
from millrace.engine.runner import Runner
from millrace.engine.sampler import Sampler
from millrace.engine.sampling import DeviceSampling
from millrace.engine.transport import ThreadTransport
from millrace.engine.turn import Pass, Seen, Turn
from millrace.engine.warmup import warm_up
from millrace.models.placement import place
from millrace.protocol import Choice, FromEngine, Sampling, Step, Submit
from millrace.protocol.prefixes import CacheQuery

CHUNK = 2048
QWEN3_8B = {
    "model_type": "qwen3",
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "vocab_size": 151936,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
}
SMALL = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
    "head_dim": 32,
}


def build(config: dict[str, Any], bits: int | None) -> Any:
    mx.random.seed(0)
    model = qwen3.Model(qwen3.ModelArgs.from_dict(config))
    model.update(tree_map(lambda w: (w * 0.5).astype(mx.bfloat16), model.parameters()))
    if bits:
        nn.quantize(model, group_size=64, bits=bits)
    mx.eval(model.parameters())
    return model


def prompts(count: int, length: int, vocab: int) -> list[list[int]]:
    dice = random.Random(1)
    return [[dice.randrange(vocab) for _ in range(length)] for _ in range(count)]


def run_raw(model: Any, rows: list[list[int]], generated: int) -> dict[str, float]:
    generator = BatchGenerator(model, max_tokens=generated, completion_batch_size=len(rows))
    begin = time.perf_counter()
    generator.insert(rows, [generated] * len(rows))
    count, full = 0, None
    while count < generated * len(rows):
        _, responses = generator.next()
        count += len(responses)
        if full is None and len(responses) == len(rows):
            full = (time.perf_counter(), count)
    return _figures(begin, full, time.perf_counter(), count)


class Ours:
    def __init__(self, model: Any, rows: int) -> None:
        self.count = 0
        self.full: tuple[float, int] | None = None
        self.rows = rows
        self.transport = ThreadTransport(self._receive)
        config = EngineConfig(
            model="random", name="random", max_running=rows, prefill_chunk=CHUNK, speculate=0
        )
        runner = Runner(model, recurring=True)
        sampler = Sampler(DeviceSampling())
        begin = time.perf_counter()
        warm_up(runner, sampler, rows, CHUNK)
        self.warm_up_seconds = time.perf_counter() - begin
        # The prefix cache is on, as it is by default, and empty: only its cost is in the figure.
        segments = runner.segments(pack=False)
        store = SegmentStore(runner.make_caches, runner.layout, None, segments)
        sizes = runner.sizes(measured_sizes(model, runner.layout, False), pack=False)
        self.engine = assemble(
            runner,
            config,
            sampler,
            Budget(replace(runner.cost, chunk=CHUNK), 80 << 30),
            self.transport,
            pipelined=True,
            index=PrefixIndex(runner.layout.needs, sizes, 16 << 30),
            store=store,
            journal=self._note,
        )
        self.turns: Counter[str] = Counter()

    def _note(self, seen: Seen, turn: Turn, _pictures: object) -> None:
        for operation in turn.operations:
            if isinstance(operation, Pass):
                tokens = sum(run.count for run in operation.prompts)
                self.turns["pass with prompts" if tokens else "pass"] += 1

    def _receive(self, message: FromEngine) -> None:
        if isinstance(message, Step):
            self.count += sum(len(r.tokens) for r in message.rows)
            if self.full is None and len(message.rows) == self.rows:
                self.full = (time.perf_counter(), self.count)

    def run(self, rows: list[list[int]], generated: int, sampling: Sampling) -> dict[str, float]:
        self.count, self.full = 0, None
        self.turns.clear()
        self.transport.put(CacheQuery("", clear=True))
        self.engine.turn()
        begin = time.perf_counter()
        for i, prompt in enumerate(rows):
            self.transport.put(Submit(i, prompt, [Choice(0, i)], generated, sampling))
        self.engine.turn()
        while self.engine.busy:
            self.engine.turn()
        return _figures(begin, self.full, time.perf_counter(), self.count)


def _figures(
    begin: float, full: tuple[float, int] | None, end: float, count: int
) -> dict[str, float]:
    out = {"seconds": end - begin, "tokens_per_s": count / (end - begin)}
    if full is not None and end > full[0]:
        out["decode_tokens_per_s"] = (count - full[1]) / (end - full[0])
    return out


def compare(bits: int | None, options: argparse.Namespace) -> dict[str, Any]:
    config = QWEN3_8B | (SMALL if options.small else {})
    rows = prompts(options.rows, options.prompt, int(config["vocab_size"]))
    greedy, drawn = Sampling(temperature=0.0), Sampling(temperature=0.8, top_p=0.95, top_k=50)
    result: dict[str, Any] = {}
    model = build(config, bits)
    run_raw(model, rows[:8], 4)
    run_raw(model, rows, 4)
    result["raw"] = run_raw(model, rows, options.generated)
    _say(bits, "raw BatchGenerator", result["raw"])
    place(model, "auto", "cuda")
    ours = Ours(model, options.rows)
    result["warm_up_seconds"] = ours.warm_up_seconds
    if options.mixed:
        return result | mixed(model, ours, options, int(config["vocab_size"]))
    result["first"] = ours.run(rows[:1], 2, greedy)
    for name, sampling in (("ours", greedy), ("ours, sampled", drawn)):
        ours.run(rows, 3, sampling)
        result[name] = ours.run(rows, options.generated, sampling)
        _say(bits, name, result[name])
    result["one row"] = ours.run(rows[:1], options.generated, greedy)
    _say(bits, "ours, one row", result["one row"])
    result["raw again"] = run_raw(model, rows, options.generated)
    _say(bits, "raw on our layers", result["raw again"])
    for key in ("tokens_per_s", "decode_tokens_per_s"):
        if key in result["raw"] and key in result["ours"]:
            result[f"ratio_{key}"] = result["ours"][key] / result["raw"][key]
    print(
        f"  warm-up {result['warm_up_seconds']:.1f} s, then first request "
        f"{result['first']['seconds']:.3f} s"
    )
    print(
        f"  ours/raw {result.get('ratio_tokens_per_s', 0):.2f} overall, "
        f"{result.get('ratio_decode_tokens_per_s', 0):.2f} decoding",
        flush=True,
    )
    return result


def mixed(model: Any, ours: Ours, options: argparse.Namespace, vocab: int) -> dict[str, Any]:
    """Prompts of 200 to 799 tokens, drawn anew for each pass; ours and raw by turns."""
    dice = random.Random(options.seed)
    greedy = Sampling(temperature=0.0)
    result: dict[str, Any] = {"passes": []}
    for number in range(options.passes):
        rows = [
            [dice.randrange(vocab) for _ in range(dice.randrange(200, 800))]
            for _ in range(options.rows)
        ]
        each = {"ours": ours.run(rows, options.generated, greedy)}
        _say(None, f"ours, mixed, pass {number + 1}", each["ours"])
        print(f"       {dict(ours.turns)}", flush=True)
        each["raw"] = run_raw(model, rows, options.generated)
        _say(None, "raw on the same", each["raw"])
        result["passes"].append(each)
    ratios = [p["ours"]["tokens_per_s"] / p["raw"]["tokens_per_s"] for p in result["passes"]]
    first, second = (p["ours"]["tokens_per_s"] for p in result["passes"][:2])
    print(
        f"  ours/raw {', '.join(f'{r:.2f}' for r in ratios)}; first over second {first / second:.2f}"
    )
    return result


def _say(bits: int | None, name: str, figures: dict[str, float]) -> None:
    decode = figures.get("decode_tokens_per_s", 0.0)
    print(
        f"{bits or 16:>3} bits  {name:22} {figures['seconds']:7.2f} s  "
        f"{figures['tokens_per_s']:8.1f} tokens/s  decoding {decode:8.1f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--made", dest="generated", type=int, default=128)
    parser.add_argument("--mixed", action="store_true", help="prompts of 200 to 799 tokens")
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--only", choices=["bf16", "4bit"])
    parser.add_argument("--small", action="store_true", help="a tiny shape, to try the script")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = {}
    for name, bits in (("bf16", None), ("4bit", 4)):
        if options.only in (None, name):
            results[name] = compare(bits, options)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
