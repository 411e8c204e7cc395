"""Putting an encoder's engine together: the model, and how large its batches may be."""

from __future__ import annotations

from millrace.config import EngineConfig
from millrace.engine.encoding.loop import EncoderEngine, Limits
from millrace.engine.transport import Transport
from millrace.flight import FlightRecorder
from millrace.models import device
from millrace.models.encoders import Encoder
from millrace.models.encoders.attention import SCORE_BYTES
from millrace.models.encoders.load import EncoderBatch, finished, load_encoder, weight_bytes
from millrace.protocol import Ready

_LIMITS = {"cpu": Limits(512, 8192), "metal": Limits(2048, 32768), "cuda": Limits(8192, 65536)}


def build_encoder(
    config: EngineConfig,
    facts: Encoder,
    transport: Transport,
    recorder: FlightRecorder | None = None,
) -> EncoderEngine:
    """Load the model and say ready. Raises ModelError when it cannot be loaded."""
    encoder = load_encoder(config, facts)
    kind = device.kind()
    dimensions = 0
    if facts.kind == "embed":
        dimensions = int(finished(encoder.vectors(EncoderBatch([[0]], [0], [0]))).shape[-1])
    limits = _LIMITS[kind]
    if config.kv_memory is not None:
        # What it was given is for its batches, beside the scores of a block.
        most = max(1, (config.kv_memory - SCORE_BYTES) // encoder.bytes_per_token)
        limits = Limits(min(limits.least, most), min(limits.most, most))
    engine = EncoderEngine(encoder, transport, limits, recorder)
    transport.send(
        Ready(
            context=facts.length,
            device=kind,
            dtype=encoder.dtype,
            vocab_size=encoder.vocabulary,
            load_seconds=encoder.seconds,
            weight_bytes=weight_bytes(encoder),
            kv_budget=0,
            kv_bytes_per_token=0,
            device_bytes=device.describe().memory,
            memory=device.memory_now(),
            dimensions=dimensions,
        )
    )
    return engine
