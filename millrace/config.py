"""The configuration, frozen and checked once, and where things live on this machine."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Literal

import msgspec

from millrace.errors import SetupError

Weights = Literal["auto", "keep", "bf16", "f32"]
LogFormat = Literal["text", "json"]
SmgEngine = Literal["vllm", "mlx", "both"]
MetricsNames = Literal["millrace", "vllm", "both"]
Isolation = Literal["none", "key"]
Role = Literal["use", "admin"]
"""What the holder of an API key may do: use the models, or manage the server as well."""
Task = Literal["auto", "generate", "embed", "rerank"]
"""What a model is for; `auto` is what its folder says."""
GroupBackend = Literal["ring", "jaccl", "nccl"]
"""MLX's ways for ranks to talk."""
Parallel = Literal["auto", "tensor", "pipeline"]
"""How a model is split: every layer over all ranks, or whole layers; `auto` is what the model offers."""
_SERVER_NAME = re.compile(r"[A-Za-z][A-Za-z0-9._-]{0,63}")
MOST_NAME = 256
"""Characters of an adapter's name."""


def home() -> Path:
    """The user's folder for models, converted weights and libraries (`MILLRACE_HOME`)."""
    if chosen := os.environ.get("MILLRACE_HOME"):
        return Path(chosen).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "millrace"
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "millrace"


class LimitSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a key, or a model for all its callers together, is held to; None sets no limit."""

    rate_requests: int | None = None
    """Requests per minute."""
    rate_tokens: int | None = None
    """Tokens per minute, of prompts and answers together."""
    max_running: int | None = None
    """Answers of a key at the same time. (What a model has of these is in its EngineConfig.)"""
    max_prompt_tokens: int | None = None
    max_answer_tokens: int | None = None

    @property
    def given(self) -> dict[str, int]:
        found = {name: getattr(self, name) for name in self.__struct_fields__}
        return {name: value for name, value in found.items() if value is not None}


class ApiKey(msgspec.Struct, frozen=True, kw_only=True):
    """A key that opens the server, and whose it is."""

    secret: str
    name: str = ""
    role: Role = "use"
    limits: LimitSettings = LimitSettings()
    """Its own, beside those that all keys have."""

    def __repr__(self) -> str:
        return f"ApiKey(name={self.name!r}, role={self.role!r})"


class AdapterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter that a model has from its start on."""

    name: str
    path: str

    def __post_init__(self) -> None:
        if not self.name or not self.name.isprintable() or len(self.name) > MOST_NAME:
            raise SetupError(f"--lora: '{self.name[:MOST_NAME]}' is no name for an adapter.")


class RankHost(msgspec.Struct, frozen=True, kw_only=True):
    """Where one rank of a split model is."""

    address: str
    port: int
    """Of its collectives."""
    control: int
    """Where it hears orders."""
    ssh: str = ""
    """How to reach its machine to start it; it is waiting there already if this is empty."""


class GroupConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The ranks that one model is split over."""

    hosts: tuple[RankHost, ...]
    backend: GroupBackend = "ring"
    parallel: Parallel = "auto"
    devices: tuple[tuple[str | None, ...], ...] = ()
    """RDMA devices by pairs of ranks, for JACCL."""
    coordinator: str = ""
    secret: str = ""
    started: bool = False
    """Whether the server starts the other ranks on its own machine."""

    def __repr__(self) -> str:
        return f"GroupConfig({len(self.hosts)} ranks, {self.backend}, {self.parallel})"


class RankSeat(msgspec.Struct, frozen=True, kw_only=True):
    """What one process of a split model is told of its place."""

    rank: int
    turns: tuple[str, int]
    """Where the first rank tells the others what to do."""
    secret: str
    """Of this one start of the group."""
    alone: bool = True
    """Whether it has its machine for itself, and shares it with no other rank."""


class SpecPrefillConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A draft that chooses what of a long prompt is run, and when it is asked."""

    draft: str
    """Its folder."""
    on: bool = False
    """Whether it is asked where a request says nothing."""
    threshold: int = 8192
    """Tokens that must be left to run after the cached and the system part for that."""
    keep: float = 0.3
    """The share that stays of what may be left out."""

    def __post_init__(self) -> None:
        if not 0 <= self.threshold <= 2**62:
            raise SetupError(f"--specprefill-threshold cannot be {self.threshold}.")
        if not 0 < self.keep <= 1:
            raise SetupError(
                f"--specprefill-keep-pct is a share above 0 and at most 1, not {self.keep}."
            )


FEWEST_RUNNING = 32
"""Sequences that run at a time where nobody has said how many, at least."""


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """All that an engine process is told at its start."""

    model: str
    """The model folder."""
    name: str
    """The name the model is served under."""
    weights: Weights = "auto"
    context: int | None = None
    """The window in tokens; None takes the model's own."""
    max_running: int | None = None
    """Sequences that run at a time, at most; None takes what suits the device and its memory."""
    prefill_chunk: int | None = None
    """The most tokens of a step; None takes what suits the device."""
    max_stall: float | None = None
    """Seconds that no step is planned to take longer than while answers are generated; None takes what
    suits the device."""
    kv_memory: int | None = None
    """Bytes for the key-value state of running requests; None takes the device's share."""
    cache: bool = True
    """Whether the state of prompts and answers is kept for later requests."""
    cache_memory: int | None = None
    """Bytes of the prefix cache in memory; None takes a share of the device's."""
    cache_disk: int = 0
    """Bytes of the prefix cache on disk; 0 keeps none there."""
    cache_dir: str | None = None
    """Where the disk tier lives; None is the user's cache folder."""
    server_port: int = 0
    """The port of its server, told to others that find its prefix cache in use; 0 is none."""
    cache_quant: bool = False
    """Whether state at rest is stored in 8 bits."""
    cache_told: bool = False
    """Whether the engine tells what becomes of the prefix cache, for gateways that route by it."""
    checkpoint_every: int = 1024
    """Tokens between checkpoints of state that cannot be cut."""
    speculate: int | None = None
    """Draft tokens that a row may try from what its context repeats; None takes what suits the
    device, 0 tries none."""
    task: Task = "auto"
    pooling: str | None = None
    """How an encoder's states become one vector; None takes what its folder says."""
    adapters: tuple[AdapterConfig, ...] = ()
    """Those that the front has it load before it takes requests for them."""
    adapter_memory: int | None = None
    """Bytes for adapters; None takes a tenth of what there is for state."""
    picture_memory: int | None = None
    """Bytes for the features of pictures; None takes a twentieth of what there is for state."""
    group: GroupConfig | None = None
    """The ranks that the model is split over; None for one process that has all of it."""
    seat: RankSeat | None = None
    """This process's place among them."""
    specprefill: SpecPrefillConfig | None = None
    """None has no draft."""
    draft_memory: int | None = None
    """Bytes for a draft's state: the prompt at hand and its own prefix cache; None takes an eighth of what
    there is for state."""
    trust_remote_code: bool = False
    tool_format: str | None = None
    """The family of tool calls; None detects it."""
    reasoning_format: str | None = None
    strip_volatile: tuple[str, ...] = ()
    """Patterns of lines that are left out of system messages; `auto` stands for ours."""
    log_level: str = "info"
    log_format: LogFormat = "text"

    def __post_init__(self) -> None:
        for option, value in (
            ("--max-running", self.max_running),
            ("--prefill-chunk", self.prefill_chunk),
            ("--max-stall", self.max_stall),
            ("--kv-memory", self.kv_memory),
            ("--cache-memory", self.cache_memory),
            ("--checkpoint-every", self.checkpoint_every),
            ("--lora-memory", self.adapter_memory),
        ):
            if value is not None:
                _positive(option, value)
        if self.context is not None:
            _positive("--context", self.context)
        if self.group is not None and self.specprefill is not None:
            raise SetupError(
                "--specprefill-draft does not work for a model that is split over ranks."
            )
        if self.speculate is not None and not 0 <= self.speculate <= 64:
            raise SetupError("--speculate takes 0 to 64 tokens.")
        names = [one.name for one in self.adapters]
        if twice := next((n for n in names if names.count(n) > 1 or n == self.name), None):
            raise SetupError(f"--lora: the name '{twice}' is taken.")


class ServeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """All that the front is told at its start."""

    engine: EngineConfig
    """What all engines are told alike; each model has its own folder and name."""
    host: str = "127.0.0.1"
    port: int = 8000
    server_name: str | None = None
    """How other commands on this machine call this server."""
    drain_timeout: float = 30.0
    max_body: int = 32 * 1024 * 1024
    keep_alive: float = 5.0
    """Seconds between SSE comment lines while nothing else is sent."""
    reader_timeout: float = 60.0
    """Seconds after which a client that takes nothing of its answer is let go."""
    max_connections_per_address: int | None = None
    """Connections that one client address may have; None takes half of the descriptors, 0 sets no limit."""
    max_queue: int = 256
    """Answers that may wait for a place in the batch; more are refused with a 429."""
    store: str | None = None
    """The file of stored responses; None is one in the user's folder, `none` keeps nothing."""
    store_days: int = 30
    """Days after which a stored response that nothing was built on is dropped."""
    store_limit: int | None = None
    """Bytes of all stored responses; None takes half of the free disk space, and 16 GiB at most."""
    memory: int | None = None
    """Bytes for all models together; None takes most of the device's."""
    max_waiting: int = 256
    """Requests that may wait for a model to be loaded; more are refused with a 503."""
    adapter_folders: tuple[str, ...] = ()
    """Where adapters may lie that are loaded while the server runs; without any, anywhere if only this
    machine reaches the server."""
    api_keys: tuple[ApiKey, ...] = ()
    """Without any, every request is let in."""
    rate_requests: int | None = None
    """Requests per minute of each key, or of each address where there are no keys."""
    rate_tokens: int | None = None
    """The same for tokens, prompt and answer together."""
    cors_origins: tuple[str, ...] = ()
    """The web sites whose pages may talk to this server; `*` is all of them."""
    allowed_hosts: tuple[str, ...] = ()
    """Names beside this machine's own under which the server may be asked; `*.` before one stands for all
    below it, and `*` alone for every name."""
    cache_isolation: Isolation = "none"
    """Whether holders of different keys share cached state."""
    remote_media: bool = True
    """Whether pictures are fetched from web addresses."""
    media_folders: tuple[str, ...] = ()
    """Where pictures may lie that requests name by file: addresses; without any, nowhere."""
    max_pictures: int = 64
    """Pictures of one request."""
    warm: str | None = None
    """A file of prompts that are run at the start, so that their state is there."""
    smg: str | None = None
    """The address at which gateways find a worker; None serves none."""
    smg_engine: SmgEngine = "vllm"
    """Whose protocol the worker speaks."""
    metrics_names: MetricsNames = "millrace"
    """Whose names the series of /metrics have."""
    defaults: dict[str, float] = {}
    """What requests get that say nothing, by the names of their fields; the model's own otherwise."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise SetupError(f"--port {self.port} is not a port; choose 1 to 65535.")
        if (name := self.server_name) is not None and not _SERVER_NAME.fullmatch(name):
            raise SetupError(
                f"--server-name {name!r} is no name: use letters, digits, '.', '_' and '-', up to 64, "
                "and begin with a letter."
            )
        if self.smg is not None:
            host, _, port = self.smg.rpartition(":")
            if not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
                raise SetupError(f"--smg {self.smg} is no address; write it like 127.0.0.1:50051.")
        if not self.drain_timeout >= 0:
            raise SetupError("--drain-timeout cannot be negative.")
        _positive("--keep-alive", self.keep_alive)
        _positive("--max-body", self.max_body)
        _positive("--reader-timeout", self.reader_timeout)
        if self.max_queue < 0:
            raise SetupError("--max-queue cannot be negative.")
        if (self.max_connections_per_address or 0) < 0:
            raise SetupError("--max-connections-per-address cannot be negative; 0 sets no limit.")
        _positive("--store-days", self.store_days)
        if self.store_limit is not None:
            _positive("--store-limit", self.store_limit)
        _positive("--max-waiting", self.max_waiting)
        _positive("--max-pictures", self.max_pictures)
        if self.memory is not None:
            _positive("--memory", self.memory)
        for name in self.allowed_hosts:
            if name != "*" and not re.fullmatch(r"(\*\.)?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*", name):
                raise SetupError(
                    f"--allowed-host {name} is no name; write it like llm.example.org, without scheme "
                    "and port."
                )
        if self.cache_isolation == "key" and not self.api_keys:
            raise SetupError("--cache-isolation key needs API keys to tell callers apart.")
        if self.cache_isolation == "key" and self.warm is not None:
            raise SetupError(
                "--warm has no use with --cache-isolation key: nobody would find its state. "
                "Let each key warm its own with POST /v1/cache/warm."
            )
        for option, value in (
            ("--rate-requests", self.rate_requests),
            ("--rate-tokens", self.rate_tokens),
        ):
            if value is not None:
                _positive(option, value)


def _positive(option: str, value: float) -> None:
    if not value > 0:  # nor what is no number
        raise SetupError(f"{option} must be greater than 0, not {value}.")
