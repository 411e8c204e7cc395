"""Four text streams while eight pictures come, on one engine: the gaps between their tokens.

Random weights in the shape of Qwen2.5-VL-7B (`--small`: of a model that a CPU runs), pictures of 1036 by
1036 pixels as its processor hands them on. Each round has new pictures; in the first, kernels are compiled
and attention is planned for shapes that were never run.
`python benchmarks/vision.py [--small] [--rounds 3] [--longest 5]`
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from millrace.models import blas, device

device.before_import()
blas.prepare()

import mlx.core as mx  # noqa: E402
import numpy as np  # noqa: E402
from mlx.utils import tree_map  # noqa: E402
from mlx_vlm.models import qwen2_5_vl  # noqa: E402

from millrace.config import EngineConfig  # noqa: E402
from millrace.engine.assembly import assemble  # noqa: E402
from millrace.engine.memory import Budget  # noqa: E402
from millrace.engine.runner import Runner  # noqa: E402
from millrace.engine.sampler import Sampler  # noqa: E402
from millrace.engine.sampling import DeviceSampling, HostSampling  # noqa: E402
from millrace.engine.transport import ThreadTransport  # noqa: E402
from millrace.engine.turn import EncodePicture, Pass, Seen, Turn  # noqa: E402
from millrace.engine.warmup import warm_up  # noqa: E402
from millrace.models.vision.families import FAMILIES  # noqa: E402
from millrace.models.vision.model import VisionLanguageModel  # noqa: E402
from millrace.protocol import (  # noqa: E402
    Abort,
    Choice,
    FromEngine,
    Picture,
    PicturesWanted,
    Sampling,
    Span,
    Step,
    Submit,
    Tensor,
)

SIDE = 74
"""Patches of a picture's side."""
IMAGE, BEFORE, AFTER = 151655, 151652, 151653
TEXT = {
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "tie_word_embeddings": False,
}
TOWER = {
    "depth": 32,
    "hidden_size": 1280,
    "intermediate_size": 3420,
    "out_hidden_size": 3584,
    "num_heads": 16,
    "fullatt_block_indexes": [7, 15, 23, 31],
}
SMALL_TEXT = {"hidden_size": 512, "num_hidden_layers": 4, "intermediate_size": 1024}
SMALL_TEXT |= {"num_attention_heads": 4, "num_key_value_heads": 2}
SMALL_TOWER = {"depth": 4, "hidden_size": 160, "intermediate_size": 320, "out_hidden_size": 512}
SMALL_TOWER |= {"num_heads": 2, "fullatt_block_indexes": [3]}


def model(small: bool) -> VisionLanguageModel:
    text = TEXT | SMALL_TEXT if small else TEXT
    tower = TOWER | SMALL_TOWER if small else TOWER
    settings = qwen2_5_vl.ModelConfig.from_dict({"model_type": "qwen2_5_vl", "vision_config": {}})
    settings.text_config = qwen2_5_vl.TextConfig.from_dict({"model_type": "qwen2_5_vl", **text})
    settings.vision_config = qwen2_5_vl.VisionConfig.from_dict(tower)
    inner = qwen2_5_vl.Model(settings)
    kind = mx.float32 if small else mx.bfloat16
    inner.update(
        tree_map(lambda x: (0.02 * mx.random.normal(x.shape)).astype(kind), inner.parameters())
    )
    mx.eval(inner.parameters())
    family = next(f for f in FAMILIES if f.model_type == "qwen2_5_vl")
    return VisionLanguageModel(inner, family, 2)


class Streams:
    """An engine, and when the tokens of its text streams came."""

    def __init__(self, seeing: VisionLanguageModel) -> None:
        on_cpu = mx.default_device() == mx.cpu
        backend = HostSampling() if on_cpu else DeviceSampling()
        self.transport = ThreadTransport(self._hear)
        self.made: dict[int, int] = {}
        self.gaps: list[float] = []
        self.turns: list[tuple[float, Turn]] = []
        self._last: dict[int, float] = {}
        self._dice = np.random.default_rng(0)
        # Made before anything is measured: the engine's thread would wait for it.
        pixels = self._dice.standard_normal((SIDE * SIDE, 1176), np.float32)
        self._tensors = {
            "pixel_values": Tensor("float32", pixels.shape, pixels.tobytes()),
            "image_grid_thw": Tensor("int64", (1, 3), np.array([1, SIDE, SIDE]).tobytes()),
        }
        runner = Runner(seeing, recurring=not on_cpu)
        if not on_cpu:
            seeing.warm_up()
            warm_up(runner, Sampler(backend), 16, 2048)
        self.engine = assemble(
            runner,
            EngineConfig(model="random", name="random", max_running=16, prefill_chunk=2048),
            Sampler(backend),
            Budget(runner.cost, 16 << 30),
            self.transport,
            pipelined=not on_cpu,
            journal=self._note,
        )

    def _note(self, seen: Seen, turn: Turn, pictures: list[Picture]) -> None:
        self.turns.append((time.perf_counter(), turn))

    def longest(self, count: int) -> None:
        """Say what was in the turns that took longest."""
        ends = [begin for begin, _ in self.turns[1:]]
        took = [
            (end - begin, turn) for (begin, turn), end in zip(self.turns[:-1], ends, strict=True)
        ]
        for seconds, turn in sorted(took, key=lambda each: -each[0])[:count]:
            print(f"    {1000 * seconds:.1f} ms: {', '.join(map(_in_words, turn.operations))}")

    def text(self, id: int, tokens: int) -> None:
        prompt = self._dice.integers(3, 150000, 400).tolist()
        self._put(Submit(id, prompt, [Choice(0, id)], tokens, Sampling(temperature=0.0)))

    def picture(self, id: int) -> None:
        count = (SIDE // 2) ** 2
        text = self._dice.integers(3, 150000, 24).tolist()
        prompt = [*text[:10], BEFORE, *[IMAGE] * count, AFTER, *text[10:]]
        span = Span(11, count, str(id), (1, SIDE, SIDE))
        self._put(Submit(id, prompt, [Choice(0, 0)], 8, Sampling(temperature=0.0), media=[span]))

    def run(self, until: Any) -> None:
        while not until():
            self.engine.turn()

    def _put(self, request: Submit) -> None:
        self.made[request.id] = 0
        self.transport.put(request)

    def _hear(self, message: FromEngine) -> None:
        if isinstance(message, PicturesWanted):
            for digest in message.digests:
                self.transport.put(Picture(digest, self._tensors))
        for row in message.rows if isinstance(message, Step) else ():
            now = time.perf_counter()
            self.made[row.id] += len(row.tokens)
            if row.id < 1000:
                if row.id in self._last:
                    self.gaps.append(now - self._last[row.id])
                self._last[row.id] = now


def _in_words(operation: Any) -> str:
    name = type(operation).__name__
    match operation:
        case Pass(prompts=prompts) if prompts:
            return f"{name} with {sum(run.count for run in prompts)} prompt tokens"
        case EncodePicture(parts=parts):
            return f"{name} in {parts}"
    return name


def told(name: str, gaps: list[float]) -> None:
    ordered = sorted(gaps)
    at = [1000 * ordered[int(q * (len(ordered) - 1))] for q in (0.5, 0.9, 0.99, 1)]
    print(
        f"{name}: median {at[0]:.1f}, p90 {at[1]:.1f}, p99 {at[2]:.1f}, most {at[3]:.1f} ms",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--longest", type=int, default=0, help="turns to tell of, each round")
    asked = parser.parse_args()
    streams = Streams(model(asked.small))
    for number in range(asked.rounds):
        ids = range(100 * number, 100 * number + 4)
        for id in ids:
            streams.text(id, 2000)
        streams.run(lambda ids=ids: min(streams.made[i] for i in ids) > 20)
        streams.gaps.clear()
        streams.run(lambda ids=ids: min(streams.made[i] for i in ids) > 120)
        told(f"round {number + 1}, text alone", streams.gaps)
        streams.gaps.clear()
        streams.turns.clear()
        begin = time.perf_counter()
        seen = range(1000 + 8 * number, 1008 + 8 * number)
        for id in seen:
            streams.picture(id)
        streams.run(lambda seen=seen: all(streams.made[i] == 8 for i in seen))
        told(f"  eight pictures in {time.perf_counter() - begin:.1f} s", streams.gaps)
        streams.longest(asked.longest)
        for id in ids:
            streams.transport.put(Abort(id))
        streams.engine.turn()


if __name__ == "__main__":
    main()
