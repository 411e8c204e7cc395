"""The configuration, frozen and checked once, and where things live on this machine."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Literal

import msgspec

from millrace.errors import SetupError

Weights = Literal["auto", "keep", "bf16", "f32"]
LogFormat = Literal["text", "json"]


def home() -> Path:
    """The user's folder for models, converted weights and libraries (`MILLRACE_HOME`)."""
    if chosen := os.environ.get("MILLRACE_HOME"):
        return Path(chosen).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "millrace"
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "millrace"


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """All that an engine process is told at its start."""

    model: str
    """The model folder."""
    name: str
    """The name the model is served under."""
    weights: Weights = "auto"
    context: int | None = None
    """The window in tokens; None takes the model's own."""
    max_running: int = 32
    prefill_chunk: int | None = None
    """The most prompt tokens run between two decode steps; None takes what suits the device."""
    max_stall: float | None = None
    """Seconds that a prompt may hold up running streams; None takes 2.5 recent decode steps."""
    kv_memory: int | None = None
    """Bytes for the key-value state of running requests; None takes the device's share."""
    trust_remote_code: bool = False
    tool_format: str | None = None
    """The family of tool calls; None detects it."""
    reasoning_format: str | None = None
    log_level: str = "info"
    log_format: LogFormat = "text"

    def __post_init__(self) -> None:
        _positive("--max-running", self.max_running)
        for option, value in (
            ("--prefill-chunk", self.prefill_chunk),
            ("--max-stall", self.max_stall),
            ("--kv-memory", self.kv_memory),
        ):
            if value is not None:
                _positive(option, value)
        if self.context is not None:
            _positive("--context", self.context)


class ServeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """All that the front is told at its start."""

    engine: EngineConfig
    host: str = "127.0.0.1"
    port: int = 8000
    drain_timeout: float = 30.0
    max_body: int = 32 * 1024 * 1024
    keep_alive: float = 5.0
    """Seconds between SSE comment lines while nothing else is sent."""
    max_queue: int = 256
    """Answers that may wait for a place in the batch; more are refused with a 429."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise SetupError(f"--port {self.port} is not a port; choose 1 to 65535.")
        if self.drain_timeout < 0:
            raise SetupError("--drain-timeout cannot be negative.")
        _positive("--max-body", self.max_body)
        if self.max_queue < 0:
            raise SetupError("--max-queue cannot be negative.")


def _positive(option: str, value: float) -> None:
    if value <= 0:
        raise SetupError(f"{option} must be greater than 0, not {value}.")
