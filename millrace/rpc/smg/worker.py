"""The one model that a gateway sees behind this worker, and what may be asked of it.

It knows our registry, requests and errors; of the engines' messages it knows those that both share.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from types import ModuleType
from typing import Any

from millrace.config import FEWEST_RUNNING, ServeConfig
from millrace.errors import BadRequest, EngineUnavailable
from millrace.models.window import read_config
from millrace.protocol.prefixes import CacheChange
from millrace.rpc.smg.answers import Answers, Endings
from millrace.rpc.smg.bundle import bundle
from millrace.rpc.smg.callers import Callers
from millrace.rpc.smg.kv_events import KvEvents
from millrace.rpc.smg.loads import Load, Loads
from millrace.rpc.smg.params import prompt_ids, request_of
from millrace.serving import dispatch, ids
from millrace.serving.catalogue import ModelSpec
from millrace.serving.client import EngineClient
from millrace.serving.dispatch import Origin
from millrace.serving.encodings import numbers
from millrace.serving.metrics import Metrics
from millrace.serving.model import ServedModel
from millrace.serving.quotas import Quotas
from millrace.serving.registry import Registry
from millrace.serving.slices import SlicePace

_LONGEST_WAIT = 3600.0
_LOOK = 0.05
"""Seconds between two looks at what is in flight."""


class Worker:
    def __init__(
        self,
        registry: Registry,
        spec: ModelSpec,
        config: ServeConfig,
        quotas: Quotas,
        metrics: Metrics,
    ) -> None:
        self._registry = registry
        self._spec = spec
        self.callers = Callers(config, quotas, metrics)
        self._loads = Loads()
        self.events = KvEvents(self.load)
        self._bundle: bytes | None = None
        self._endings: Endings | None = None
        self._began = time.monotonic()
        self.heard = 0.0
        """When work was last asked for, on the wall's clock."""
        self.draining = False

    def cache_changed(self, name: str, changes: Sequence[CacheChange]) -> None:
        if name == self._spec.name:
            self.events.take(changes)

    def drain(self) -> None:
        """Take nothing new; what runs goes on."""
        self.draining = True
        self.events.close()

    @property
    def uptime(self) -> float:
        return time.monotonic() - self._began

    @property
    def client(self) -> EngineClient | None:
        """Of the engine, where there is one or will be."""
        instance = self._registry.standing(self._spec).instance
        return instance.client if instance is not None else None

    @property
    def max_running(self) -> int:
        """Sequences that run at a time, at most."""
        if (client := self.client) is not None:
            return client.admission.max_running
        return self._spec.engine.max_running or FEWEST_RUNNING

    @property
    def active(self) -> int:
        client = self.client
        return len(client.in_flight) if client is not None else 0

    def load(self) -> Load:
        return self._loads.of(self.client, self.max_running)

    def trouble(self) -> str | None:
        """Why requests are not being served; None if they are."""
        if self.draining:
            return "The server is shutting down."
        standing = self._registry.standing(self._spec)
        if standing.state in ("failed", "broken"):
            return standing.failure or "The model could not be loaded."
        # A model that is loaded when it is asked for can be asked.
        return standing.instance.client.why if standing.instance is not None else None

    @asynccontextmanager
    async def _model(self, *, loads: bool = True) -> AsyncIterator[ServedModel]:
        lease = await self._registry.lease(self._spec.name, loads=loads)
        try:
            yield lease.model
        finally:
            lease.release()

    async def generate(
        self, messages: ModuleType, wire: Any, context: Any, method: str
    ) -> AsyncIterator[Any]:
        origin = self._admitted(context, method)
        async with self._model() as model:
            id = self._id(wire.request_id, "smg-", origin)
            request = await asyncio.to_thread(request_of, wire, id, model)
            running = dispatch.run(model, request, origin)
            # However the call ends, also where nobody asks for its next message.
            context.add_done_callback(lambda _: running.close())
            try:
                endings = self._ends(model)
                answers = Answers(messages, request, running, endings, streamed=wire.stream)
                async for message in answers.messages():
                    yield message
            finally:
                running.close()

    async def embed(self, wire: Any, context: Any, method: str) -> tuple[list[float], int]:
        """A vector, and the tokens it stands for."""
        origin = self._admitted(context, method)
        async with self._model() as model:
            encodings = model.encodings
            encodings.need_vectors()
            await model.client.settled()
            inputs = encodings.tokens([prompt_ids(wire.tokenized, model)])
            id = self._id(wire.request_id, "emb-", origin)
            running = dispatch.run_encoding(encodings, id, inputs, origin)
            try:
                found = await running.found()
            finally:
                running.close()
            return numbers(found[0]), inputs.count

    async def abort(self, ids_: Sequence[str], viewer: str | None) -> None:
        """End requests by their ids; a `viewer` ends its own alone."""
        clients = [model.client for model in self._registry.all()]
        pace = SlicePace()
        for id in ids_:
            for client in clients:
                client.cancel(id, viewer)
            await pace.rest()

    async def idle(self, seconds: float) -> int:
        """Wait so long for requests to end; returns how many are left."""
        if not 0 <= seconds <= _LONGEST_WAIT:
            raise BadRequest(f"timeout_s must be 0 to {_LONGEST_WAIT:g}.", param="timeout_s")
        deadline = time.monotonic() + seconds
        while self.active and time.monotonic() < deadline:
            await asyncio.sleep(_LOOK)
        return self.active

    async def flush(self) -> bool:
        """Drop the prefix cache; False if there is none."""
        async with self._model(loads=False) as model:
            return (await model.client.cache(clear=True)).enabled

    async def bundle(self) -> bytes:
        async with self._model(loads=False) as model:
            if self._bundle is None:
                self._bundle = await asyncio.to_thread(bundle, model.tokenizer)
            return self._bundle

    async def facts(self) -> dict[str, Any]:
        """What the model is, by the names that both engines' messages have for it."""
        async with self._model(loads=False) as model:
            tokenizer = model.tokenizer
            config = await asyncio.to_thread(read_config, tokenizer.folder)
            named = {name: _token(model, name) for name in ("pad_token", "bos_token")}
            return {
                "model_path": str(tokenizer.folder),
                "is_generation": not model.is_encoder,
                "max_context_length": model.window,
                "vocab_size": model.width,
                "served_model_name": model.name,
                "model_type": str(config.get("model_type") or ""),
                "architectures": [str(a) for a in config.get("architectures") or ()],
                "eos_token_ids": sorted(tokenizer.eos_ids),
                "max_req_input_len": max(1, model.window - 1),
            } | {f"{name}_id": id for name, id in named.items() if id is not None}

    async def sampling_defaults(self) -> str:
        """What requests get that say nothing, as JSON."""
        async with self._model(loads=False) as model:
            return json.dumps(model.defaults)

    def _admitted(self, context: Any, method: str) -> Origin:
        origin = self.callers.admitted(context, method)
        if self.draining:
            raise EngineUnavailable("The server is shutting down.")
        self.heard = time.time()
        return origin

    def _id(self, chosen: str, prefix: str, origin: Origin) -> str:
        if not chosen:
            return f"{prefix}{secrets.token_hex(12)}"
        return ids.checked(self._registry, chosen, "request_id", origin.caller)

    def _ends(self, model: ServedModel) -> Endings:
        if self._endings is None:
            self._endings = Endings(model.tokenizer)
        return self._endings


def _token(model: ServedModel, name: str) -> int | None:
    text = model.tokenizer.token_text(name)
    return model.tokenizer.vocabulary.id_of(text) if text else None
