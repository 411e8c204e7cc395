"""The wire types of what the server tells of itself."""

from __future__ import annotations

from typing import Literal

import msgspec

from millrace.config import Role
from millrace.serving.history import EndedRequest, HistorySample
from millrace.serving.in_flight import Phase
from millrace.serving.keeper import State
from millrace.serving.memory import ModelMemory
from millrace.serving.ranks.group import RankStatus


class Links(msgspec.Struct):
    docs: str
    models: str


class Root(msgspec.Struct):
    name: str
    version: str
    links: Links


class Health(msgspec.Struct):
    status: State
    models: dict[str, State]
    error: str | None = None
    ranks: dict[str, list[str]] | None = None
    """Of models that are split: how each rank is."""


class Cancellation(msgspec.Struct):
    id: str
    cancelled: Literal[True]


class SparseStatus(msgspec.Struct):
    """What a draft chose of a prompt."""

    scored_tokens: int
    draft_tokens: int
    """Those of them that it had to run."""
    kept_tokens: int
    total_tokens: int
    scoring_seconds: float
    prefill_seconds: float | None


class RequestStatus(msgspec.Struct):
    id: str
    phase: Phase
    prompt_tokens: int
    cached_tokens: int
    cache_hit: str
    prefilled_tokens: int
    progress: float
    made_tokens: int
    max_tokens: int
    age_seconds: float
    ttft_seconds: float | None
    tokens_per_second: float | None
    resumes: int
    priority: int
    endpoint: str
    key: str | None
    """The name of the API key that it came with, else the key's id; None on a server without keys."""
    specprefill: SparseStatus | None = None


class MemoryStatus(msgspec.Struct):
    """Bytes of the engine's device: in use, the most there was, freed and kept, and all there is."""

    active: int
    peak: int
    cached: int
    total: int


class TotalsStatus(msgspec.Struct):
    """Since the server began."""

    requests: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    prefilled_tokens: int


class AdapterStatus(msgspec.Struct):
    name: str
    path: str
    loaded: bool
    rank: int
    modules: int
    """How many of the model's modules it changes."""
    requests: int
    """Those that run with it now."""
    error: str | None


class ModelStatus(msgspec.Struct, kw_only=True):
    name: str
    state: State
    stage: str
    error: str | None
    """Why requests are not being served."""
    engine_pid: int | None
    residency: Literal["wished", "loading", "loaded", "leaving", "failed"]
    """Wished for and without memory yet, being loaded, there, about to be gone, or lost: it was loaded
    at the start, and its engine could not be kept up."""
    pinned: bool
    expires_at: str | None
    """When it is unloaded unless it is used before."""
    memory: ModelMemory
    """Bytes: its weights, its key-value memory in use, and the most that it may take."""
    reserved_bytes: int
    """The same as its memory's ceiling."""
    leases: int
    """Requests that have it, or wait for it."""
    restarts: int
    template_timeouts: int
    """Renderings of the chat template that were stopped at their deadline: a fault of the model's files."""
    context_window: int | None
    device: str | None
    dtype: str | None
    weight_bytes: int | None
    load_seconds: float | None
    kv_budget: int | None
    kv_bytes_per_token: int | None
    device_memory: MemoryStatus | None
    kv_bytes: int
    """State of the requests that run."""
    cache_bytes: int
    """Prefixes kept in memory."""
    cache_disk_bytes: int
    cache_note: str | None
    """Why prefixes are kept in memory only, although a prefix cache on disk was asked for."""
    adapters: list[AdapterStatus]
    adapter_bytes: int
    totals: TotalsStatus
    requests: list[RequestStatus]
    """Those of the caller's own key; administrators see all."""
    ranks: list[RankStatus] | None = None
    """Of a model that is split over several."""


class MemoryBudget(msgspec.Struct):
    """Bytes of all models together."""

    limit: int | None
    """What they may take: the device's part for models, less what other servers held at the last load."""
    reserved: int
    """The sum of their ceilings."""
    weights: int
    kv_in_use: int
    """State of running requests, and prefixes that are kept in memory."""
    held: int
    """What they take now, with what their processes need besides weights and key-value memory."""
    other_servers: int
    """What other servers on this machine held then."""


class Status(msgspec.Struct):
    version: str
    memory: MemoryBudget
    models: list[ModelStatus]


class RunningRequest(RequestStatus, kw_only=True):
    model: str


class Requests(msgspec.Struct):
    """Those of the caller's own key; administrators see all."""

    running: list[RunningRequest]
    """Oldest first."""
    ended: list[EndedRequest]
    """Newest first."""


class KeyLimits(msgspec.Struct):
    """What the caller is held to, and what is left of it; null where there is no limit."""

    rate_requests: int | None = None
    remaining_requests: int | None = None
    rate_tokens: int | None = None
    remaining_tokens: int | None = None
    max_running: int | None = None
    running: int | None = None
    """Answers of the key that are running, where their number is limited."""
    max_prompt_tokens: int | None = None
    max_answer_tokens: int | None = None


class KeyStatus(msgspec.Struct):
    """The API key that the request came with."""

    required: bool
    """Whether this server has keys; without, everybody may do everything."""
    role: Role
    name: str | None = None
    reason: str | None = None
    """Why administration is refused, and how to grant it; None where it is not."""
    limits: KeyLimits = msgspec.field(default_factory=KeyLimits)


class StatusEvent(Status, kw_only=True):
    """What a stream of the server's status brings every second, after a `history` of all samples."""

    sample: HistorySample
