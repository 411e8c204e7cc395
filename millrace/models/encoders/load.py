"""Loading an encoder: a folder becomes a network on the device, and what comes after it."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_reduce

from millrace.config import EngineConfig
from millrace.errors import ModelError
from millrace.models import device, placement
from millrace.models.encoders.bert import BertNetwork, Pass
from millrace.models.encoders.decoder import DecoderNetwork, GemmaNetwork, load_decoder
from millrace.models.encoders.dense import Dense, fill, load_dense
from millrace.models.encoders.facts import ENCODERS, Encoder
from millrace.models.encoders.heads import Head
from millrace.models.encoders.names import renamed
from millrace.models.encoders.pooling import pool
from millrace.models.encoders.shapes import shape_of
from millrace.models.window import read_config

_TILE = 32
"""On a GPU, texts are filled up to a multiple of this."""


@dataclass(frozen=True)
class EncoderBatch:
    """Texts that are run together."""

    tokens: list[list[int]]
    segments: list[int]
    """Where each text's second part begins; 0 if it has none."""
    skips: list[int]
    """Tokens at each text's start that are not pooled."""

    @property
    def lengths(self) -> list[int]:
        return [len(t) for t in self.tokens]


class LoadedEncoder:
    """What the engine runs: batches in, vectors or logits out, in float32."""

    def __init__(
        self,
        facts: Encoder,
        network: BertNetwork | DecoderNetwork | GemmaNetwork,
        vocabulary: int,
        size: tuple[int, int],
        *,
        dense: list[Dense] | None = None,
        head: Head | None = None,
        score: nn.Linear | None = None,
    ) -> None:
        self.facts = facts
        self.vocabulary = vocabulary
        self._network = network
        self._width, self._inner = size
        self._dense = dense or []
        self._head = head
        self._score = score
        self.seconds = 0.0

    @property
    def modules(self) -> list[Any]:
        network = self._network
        base = network if isinstance(network, BertNetwork) else network.model
        return [m for m in (base, self._head, self._score, *self._dense) if m is not None]

    @property
    def dtype(self) -> str:
        """What it computes in."""
        found: set[str] = set()
        for module in self.modules:
            for _, value in tree_flatten(module.parameters()):
                if mx.issubdtype(value.dtype, mx.floating):
                    found.add(str(value.dtype).removeprefix("mlx.core."))
        return "float32" if "float32" in found else min(found, default="float32")

    @property
    def bytes_per_token(self) -> int:
        """About what a token takes while a layer runs, in float32."""
        return 4 * (8 * self._width + 4 * self._inner)

    def states(self, batch: EncoderBatch) -> Pass:
        lengths = batch.lengths
        longest = max(lengths)
        if mx.default_device().type != mx.DeviceType.cpu:
            # Every new shape may cost a plan or a compilation there.
            longest = max(longest, min(self.facts.length, -(-longest // _TILE) * _TILE))
        rows = [t + [0] * (longest - len(t)) for t in batch.tokens]
        types = None
        if any(batch.segments):
            types = mx.array(
                [
                    [int(bool(s) and s <= i < n) for i in range(longest)]
                    for s, n in zip(batch.segments, lengths, strict=True)
                ]
            )
        return (yield from self._network.states(mx.array(rows), lengths, types))

    def vectors(self, batch: EncoderBatch) -> Generator[None, None, mx.array]:
        """A vector per text, neither cut nor made of length 1."""
        states = yield from self.states(batch)
        found = pool(states, batch.lengths, self.facts.pooling, batch.skips)
        for dense in self._dense:
            found = dense(found)
        return found.astype(mx.float32)

    def logits(self, batch: EncoderBatch, wanted: list[int]) -> Generator[None, None, mx.array]:
        """A number per label; of a decoder that judges, one per token that is `wanted`."""
        states = yield from self.states(batch)
        if self._head is not None:
            return self._head(states, batch.lengths)
        last = pool(states, batch.lengths, ("lasttoken",), batch.skips).astype(states.dtype)
        if self._score is not None:
            return self._score(last).astype(mx.float32)
        assert isinstance(self._network, DecoderNetwork)
        return self._network.logits(last)[:, mx.array(wanted)].astype(mx.float32)


def load_encoder(config: EngineConfig, facts: Encoder) -> LoadedEncoder:
    """Load, place and try; every failure is a ModelError that names the folder."""
    start = time.monotonic()
    folder = Path(config.model)
    device.configure()
    if device.kind() == "cpu":
        mx.disable_compile()
    try:
        loaded = _loaded(folder, config, facts)
        _try(loaded)
    except MemoryError as error:
        raise ModelError(f"{folder} does not fit into this machine's memory.") from error
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, AttributeError) as error:
        raise ModelError(f"The model in {folder} cannot be loaded: {error!r}.") from error
    loaded.seconds = time.monotonic() - start
    return loaded


def _loaded(folder: Path, config: EngineConfig, facts: Encoder) -> LoadedEncoder:
    settings = read_config(folder)
    if facts.family in ENCODERS:
        loaded = _encoder(folder, settings, facts)
    else:
        loaded = _decoder(folder, settings, facts, config.trust_remote_code)
    for module in loaded.modules:
        _place(module, config, facts)
        mx.eval(module.parameters())
    return loaded


def _place(module: Any, config: EngineConfig, facts: Encoder) -> None:
    kind = device.kind()
    # On a CPU, batches of many rows are BLAS's, which knows float32 only.
    weights = "f32" if kind == "cpu" and config.weights == "auto" else config.weights
    placement.place(module, weights, kind)
    # float16 has too small a range for some of these models; the others are small enough to widen.
    wide = mx.float32 if facts.family in ENCODERS else mx.bfloat16
    module.apply(lambda x: x.astype(wide) if x.dtype == mx.float16 else x)


def _encoder(folder: Path, settings: dict[str, Any], facts: Encoder) -> LoadedEncoder:
    shape = shape_of(settings)
    network = BertNetwork(shape)
    raw = _weights(folder)
    is_classifier = facts.kind == "classify"
    found = renamed(raw, head=is_classifier)
    own = {k: v for k, v in found.items() if not k.startswith("head.")}
    fill(network, own)
    head = None
    if is_classifier:
        head = Head(settings, shape.width, len(facts.labels))
        fill(head, {k.removeprefix("head."): v for k, v in found.items() if k.startswith("head.")})
    dense = [load_dense(folder, path, i, raw) for i, path in enumerate(facts.dense)]
    size = shape.width, shape.inner
    return LoadedEncoder(facts, network, shape.vocabulary, size, dense=dense, head=head)


def _decoder(
    folder: Path, settings: dict[str, Any], facts: Encoder, trust_remote_code: bool
) -> LoadedEncoder:
    model, others = load_decoder(folder, settings, trust_remote_code=trust_remote_code)
    both_ways = settings.get("use_bidirectional_attention")
    network: DecoderNetwork | GemmaNetwork
    if both_ways and facts.family == "gemma3_text":
        network = GemmaNetwork(model, settings["sliding_window"])
    elif both_ways:
        raise ValueError(f"a {facts.family} that looks both ways is not supported")
    else:
        network = DecoderNetwork(model)
    score = None
    if facts.kind == "classify":
        weights = {k.removeprefix("score."): v for k, v in others.items() if k.startswith("score.")}
        if "weight" not in weights:
            raise ValueError("its classifier's weights (score.weight) are missing")
        width = settings["hidden_size"]
        score = nn.Linear(width, len(facts.labels), bias="bias" in weights)
        fill(score, weights)
    dense = [load_dense(folder, path, i, others) for i, path in enumerate(facts.dense)]
    width = settings["hidden_size"]
    size = width, settings.get("intermediate_size", 4 * width)
    vocabulary = int(settings["vocab_size"])
    return LoadedEncoder(facts, network, vocabulary, size, dense=dense, score=score)


def _weights(folder: Path) -> dict[str, mx.array]:
    weights: dict[str, mx.array] = {}
    for file in sorted(folder.glob("model*.safetensors")):
        weights |= mx.load(str(file))
    return weights


def _try(loaded: LoadedEncoder) -> None:
    """One short text through the model: it works."""
    batch = EncoderBatch([[0, 0]], [0], [0])
    work = loaded.vectors(batch) if loaded.facts.kind == "embed" else loaded.logits(batch, [0])
    mx.eval(finished(work))


def finished(
    work: Generator[None, None, mx.array], between: Callable[[], None] = lambda: None
) -> mx.array:
    """What a pass brings, run without a stop; `between` is called after each of its parts."""
    while True:
        try:
            next(work)
            between()
        except StopIteration as end:
            found: mx.array = end.value
            return found


def weight_bytes(loaded: LoadedEncoder) -> int:
    def add(total: int, value: Any) -> int:
        return total + int(value.nbytes) if isinstance(value, mx.array) else total

    return sum(int(tree_reduce(add, m.parameters(), 0)) for m in loaded.modules)
