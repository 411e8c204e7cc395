"""How a process that runs a model begins, whatever part of it that is: its configuration, its log, and the
recorder in which it is watched."""

from __future__ import annotations

import signal

import msgspec

from millrace import descriptors, logs
from millrace.config import EngineConfig
from millrace.flight import LOAD_PATIENCE, SharedRecorder
from millrace.models.lean import defer_tokenizers


def begin(raw: str, file: str) -> tuple[EngineConfig, SharedRecorder]:
    """From the arguments it was started with: a configuration in JSON, and the number of an open file."""
    recorder = SharedRecorder(int(file))
    recorder.working((), LOAD_PATIENCE)
    recorder.beat()
    config = msgspec.json.decode(raw, type=EngineConfig)
    logs.setup(config.log_level, config.log_format)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    descriptors.raise_limit()
    defer_tokenizers()
    return config, recorder
