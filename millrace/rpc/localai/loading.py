"""A model as LocalAI asks for it, made into what this server can load: every field honoured or refused.

Reads and may fetch files: not for the event loop.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from millrace.config import AdapterConfig, EngineConfig, GroupConfig, Task, Weights
from millrace.distributed.hostfile import read_hostfile
from millrace.errors import AdapterUnreadable, BadRequest, ModelError, OutOfMemory, SetupError
from millrace.models.adapters.folder import config_of
from millrace.models.adapters.tensors import new_digest
from millrace.models.encoders import encoder_in
from millrace.models.footprint import device_budget
from millrace.models.resolve import resolve
from millrace.models.window import read_config, window_of
from millrace.rpc.localai import model_options
from millrace.rpc.localai.options import BackendOptions, EngineArgs, engine_args_of, options_of
from millrace.serving.catalogue import ModelSpec
from millrace.serving.drafts import specprefill_of, with_draft
from millrace.sizes import bytes_in
from millrace.text.tokenizer import Tokenizer

log = logging.getLogger("millrace.rpc")
_ADAPTER = "adapter"
_NO_ADAPTER = ("", "none")
_DTYPES: dict[str, Weights] = {
    "": "auto",
    "auto": "auto",
    "bfloat16": "bf16",
    "bf16": "bf16",
    "float32": "f32",
    "float": "f32",
    "fp32": "f32",
    "f32": "f32",
}


@dataclass(frozen=True)
class LoadingPlan:
    """What is to be loaded, and how."""

    identity: str
    """What LocalAI calls the model, and what later calls must mean."""
    spec: ModelSpec
    options: BackendOptions
    memory: int | None
    max_queue: int
    adapter: str | None
    """The adapter that every request runs with."""
    end_ids: tuple[int, ...]
    """Tokens that end answers, beside the model's own."""
    most_pictures: int = 0
    """Pictures of one prompt; 0 is as many as it has room for."""


def plan_of(wire: Any, base: EngineConfig) -> LoadingPlan:
    """The plan for a ModelOptions message, or what is wrong with it."""
    options = options_of(wire.Options)
    given = engine_args_of(wire.EngineArgs)
    model_options.check(wire)
    group = _group(wire, options, base)
    identity = wire.Model or wire.ModelFile
    folder = _folder(wire)
    adapters = _adapters(wire)
    engine = msgspec.structs.replace(
        base,
        model=str(folder),
        name=identity,
        **_engine(wire, options, given),
        adapters=adapters,
        group=group,
    )
    engine = with_draft(engine)
    if encoder_in(engine) is None:
        engine = msgspec.structs.replace(engine, context=_window(wire, options, given, folder))
    spec = ModelSpec(
        engine=engine, template_arguments=given.template_arguments, pin=True, named=True
    )
    return LoadingPlan(
        identity=identity,
        spec=spec,
        options=options,
        memory=_memory(wire, given),
        max_queue=256 if given.max_queue is None else given.max_queue,
        adapter=adapters[0].name if adapters else None,
        end_ids=_ends(options, folder),
        most_pictures=wire.LimitImagePerPrompt,
    )


def _group(wire: Any, options: BackendOptions, base: EngineConfig) -> GroupConfig | None:
    """The ranks that the model is split over: those of the option, else those of the backend's start."""
    group = base.group
    if options.hostfile:
        backend = options.distributed_backend or os.environ.get("MLX_DISTRIBUTED_BACKEND")
        secret = os.environ.get("MILLRACE_RANKS_SECRET", "")
        try:
            group = read_hostfile(options.hostfile, backend=backend, secret=secret)
        except SetupError as error:
            raise BadRequest(error.message) from None
    elif options.distributed_backend and group is None:
        raise BadRequest(
            "the option 'distributed_backend' needs 'hostfile', which says where ranks are"
        )
    ranks = len(group.hosts) if group is not None else 1
    if wire.TensorParallelSize not in (0, ranks):
        raise BadRequest(
            f"'TensorParallelSize' ({wire.TensorParallelSize}) is not the number of ranks ({ranks}), which "
            "the option 'hostfile' names"
        )
    return group if ranks > 1 else None


def _folder(wire: Any) -> Path:
    """The model's folder: the file LocalAI found, else the model by its name or path."""
    if not wire.Model and not wire.ModelFile:
        raise BadRequest("no model is named")
    places = [Path(wire.ModelFile)] if wire.ModelFile else []
    if wire.ModelPath and wire.Model:
        places.append(Path(wire.ModelPath) / wire.Model)
    for place in places:
        if _exists(place):
            return resolve(str(place)).path
    return resolve(wire.Model or wire.ModelFile).path


def _exists(place: Path) -> bool:
    try:
        return place.exists()
    except (OSError, ValueError):
        return False


def _engine(wire: Any, options: BackendOptions, given: EngineArgs) -> dict[str, Any]:
    """What the engine is told beside the model; engine_args come first, being ours."""
    found: dict[str, Any] = {
        "weights": _weights(wire.DType),
        "task": _task(wire),
        "trust_remote_code": wire.TrustRemoteCode or options.trust_remote_code,
        "tool_format": options.tool_format,
        "reasoning_format": options.reasoning_format,
        "cache": options.cache,
    }
    sizes = ("kv_memory", "cache_memory", "cache_disk")
    found |= {n: _bytes(n, v) for n in sizes if (v := getattr(given, n)) is not None}
    found["specprefill"] = specprefill_of(
        given.specprefill_draft,
        given.specprefill,
        given.specprefill_threshold,
        given.specprefill_keep_pct,
        "engine_args ",
    )
    return found | given.engine


def _weights(dtype: str) -> Weights:
    if dtype.lower() not in _DTYPES:
        known = ", ".join(name for name in _DTYPES if name)
        raise BadRequest(f"'DType' {dtype[:100]} is not supported; there are {known}")
    return _DTYPES[dtype.lower()]


def _task(wire: Any) -> Task:
    if wire.Embeddings and wire.Reranking:
        raise BadRequest("a model makes embeddings or judges relevance, not both")
    return "embed" if wire.Embeddings else "rerank" if wire.Reranking else "auto"


def _window(wire: Any, options: BackendOptions, given: EngineArgs, folder: Path) -> int | None:
    """LocalAI always sends a context size, so one beyond the model's own is no wish for more."""
    for name in ("ContextSize", "MaxModelLen"):
        if getattr(wire, name) < 0:
            raise BadRequest(f"'{name}' is negative")
    if given.context is not None:
        return given.context
    asked = [n for n in (wire.ContextSize, wire.MaxModelLen, options.window) if n]
    return (min(asked, default=0) and min(*asked, window_of(read_config(folder)))) or None


def _memory(wire: Any, given: EngineArgs) -> int | None:
    if given.memory is not None:
        return _bytes("memory", given.memory)
    share = wire.GPUMemoryUtilization
    if not share:
        return None
    if not math.isfinite(share) or not 0 < share <= 1:
        raise BadRequest("'GPUMemoryUtilization' must be a share from 0 to 1")
    budget = device_budget()
    if budget is None:
        raise OutOfMemory("'GPUMemoryUtilization': the device's memory is not known")
    return max(1, int(share * budget))


def _bytes(name: str, value: int | str) -> int:
    try:
        size = value if isinstance(value, int) else bytes_in(value)
    except ValueError as error:
        raise BadRequest(f"engine_args: '{name}' {error}") from None
    if size < 0 or (size == 0 and name != "cache_disk"):
        raise BadRequest(f"engine_args: '{name}' must be greater than 0")
    return size


def _adapters(wire: Any) -> tuple[AdapterConfig, ...]:
    """The one adapter that all requests run with."""
    paths = [p for p in (wire.LoraAdapter, *wire.LoraAdapters) if p not in _NO_ADAPTER]
    _unscaled("LoraScale", [wire.LoraScale])
    _unscaled("LoraScales", wire.LoraScales)
    if len(set(paths)) > 1:
        raise BadRequest("several adapters on one model at a time are not supported; give one")
    if not paths:
        return ()
    path = Path(os.path.expanduser(paths[0]))
    if not path.is_absolute() and wire.ModelPath:
        path = Path(wire.ModelPath) / path
    try:
        config_of(path, new_digest())
    except AdapterUnreadable as error:
        # One answer for all reasons: the path is the caller's, and reasons tell which files exist.
        log.debug("no adapter was read: %s", error.message)
        raise ModelError(f"there is no adapter at {paths[0]} that can be read") from None
    return (AdapterConfig(name=_ADAPTER, path=str(path.absolute())),)


def _unscaled(name: str, scales: Sequence[float]) -> None:
    if any(scale not in (0.0, 1.0) for scale in scales):
        raise BadRequest(f"'{name}' other than 1 is not supported: an adapter's own scale is used")


def _ends(options: BackendOptions, folder: Path) -> tuple[int, ...]:
    if options.end is None and options.begin is None:
        return ()
    tokenizer = Tokenizer(folder)
    begin = tokenizer.token_text("bos_token")
    if options.begin is not None and options.begin != begin:
        raise BadRequest(f"the option 'bos_token' must be the model's own ({begin or 'none'})")
    if options.end is None:
        return ()
    token = tokenizer.vocabulary.id_of(options.end)
    if token is None:
        raise BadRequest(f"the option 'eos_token': '{options.end}' is no token of this model")
    return (token,)
