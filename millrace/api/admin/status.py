"""What the server tells of its models and their running requests, as the wire has it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import msgspec

from millrace.api.timestamps import moment
from millrace.serving.adapters import ServedAdapter
from millrace.serving.client import EngineClient
from millrace.serving.engine_request import EngineRequest
from millrace.serving.history import EndedRequest, EndedRequests
from millrace.serving.instance import Instance
from millrace.serving.keeper import State
from millrace.serving.memory import memory_of, server_memory
from millrace.serving.ranks.group import RankStatus, resident_peak
from millrace.serving.registry import Registry
from millrace.version import __version__


@dataclass(frozen=True)
class StatusView:
    """Who looks: which requests they are shown, and by what name they know others' keys."""

    viewer: str | None = None
    """The caller whose requests alone are shown; None shows all."""
    label: Callable[[str], str | None] = lambda id: None

    def requests(self, client: EngineClient) -> list[dict[str, Any]]:
        seen = (r for r in client.in_flight.values() if r.visible_to(self.viewer))
        return [{**_request(r), "key": self.label(r.caller)} for r in seen]

    def ended(self, requests: EndedRequests, most: int) -> list[EndedRequest]:
        found = requests.newest(most, self.viewer)
        return [msgspec.structs.replace(r, key=self.label(r.key or "")) for r in found]


def status_of(registry: Registry, view: StatusView) -> dict[str, Any]:
    found = [i for i in registry.instances() if i.phase != "text"]
    live = {i.spec.name for i in found}
    found += [i for i in registry.unavailable() if i.spec.name not in live]
    held = server_memory(registry.instances())
    memory = {
        "limit": registry.limit,
        "reserved": held.ceiling,
        "weights": held.weights,
        "kv_in_use": held.kv_in_use,
        "held": held.held,
        "other_servers": registry.taken_by_others,
    }
    return {"version": __version__, "memory": memory, "models": [_model(i, view) for i in found]}


def running_requests(registry: Registry, view: StatusView) -> list[dict[str, Any]]:
    """Those of all models that the view shows, oldest first."""
    found = [
        {"model": i.spec.name, **r} for i in registry.instances() for r in view.requests(i.client)
    ]
    return sorted(found, key=lambda r: -r["age_seconds"])


def _model(instance: Instance, view: StatusView) -> dict[str, Any]:
    client, ready = instance.client, instance.client.ready
    return {
        "name": instance.spec.name,
        "state": str(state_of(instance)),
        "stage": "ready" if client.state is State.READY else client.stage,
        "error": instance.failure.message if instance.failure else client.why,
        "residency": instance.phase,
        "pinned": instance.pinned,
        "expires_at": moment(instance.expires),
        "memory": memory_of(instance),
        "reserved_bytes": instance.reserved,
        "leases": instance.leases,
        "engine_pid": client.pid,
        "restarts": client.restarts,
        "template_timeouts": instance.model.dialect.renderer.timeouts if instance.model else 0,
        "context_window": instance.model.window if instance.model else None,
        "device": ready.device if ready else None,
        "dtype": ready.dtype if ready else None,
        "weight_bytes": ready.weight_bytes if ready else None,
        "load_seconds": ready.load_seconds if ready else None,
        "kv_budget": ready.kv_budget if ready else None,
        "kv_bytes_per_token": ready.kv_bytes_per_token if ready else None,
        "device_memory": _memory(client),
        "kv_bytes": client.metrics.held.kv_bytes,
        "cache_bytes": client.metrics.held.cache_bytes,
        "cache_disk_bytes": client.metrics.held.cache_disk_bytes,
        "cache_note": ready.cache_note if ready else None,
        "adapters": [_adapter(a, client) for a in client.adapters.list.all()],
        "adapter_bytes": client.adapters.nbytes,
        "totals": asdict(client.metrics.totals),
        "requests": view.requests(client),
        **({"ranks": ranks} if (ranks := ranks_of(client)) else {}),
    }


def state_of(instance: Instance) -> State:
    return State.FAILED if instance.failure is not None else instance.client.state


def ranks_of(client: EngineClient) -> list[dict[str, Any]]:
    """How each rank of a split model is; none of one that is not."""
    if client.group is None:
        return []
    ready, up = client.ready, client.state in (State.READY, State.STALLED)
    first = RankStatus(
        rank=0,
        address=client.group.config.hosts[0].address,
        state="ready" if up else "loading" if client.pid else "waiting",
        stage="ready" if up else client.stage,
        pid=client.pid,
        weight_bytes=ready.weight_bytes if ready else 0,
        peak_bytes=max(memory.peak if (memory := client.memory) else 0, resident_peak(client.pid)),
        turns=0,
        checks=0,
        error=None if up else client.why,
    )
    return [msgspec.structs.asdict(status) for status in client.group.status(first)]


def _adapter(adapter: ServedAdapter, client: EngineClient) -> dict[str, Any]:
    return {
        "name": adapter.name,
        "path": adapter.path,
        "loaded": client.adapters.is_loaded(adapter),
        "rank": adapter.rank,
        "modules": adapter.modules,
        "requests": client.adapters.running(adapter),
        "error": adapter.problem,
    }


def _memory(client: EngineClient) -> dict[str, int] | None:
    memory, ready = client.memory, client.ready
    if memory is None or ready is None:
        return None
    return msgspec.structs.asdict(memory) | {"total": ready.device_bytes}


def _request(active: EngineRequest) -> dict[str, Any]:
    now = time.monotonic()
    first = active.first_token
    generated, prompt = active.tokens_generated, active.prompt_tokens
    sparse = active.sparse
    to_run = sparse["kept_tokens"] if sparse else prompt
    return {
        "id": active.id,
        "phase": active.phase,
        "prompt_tokens": prompt,
        "cached_tokens": active.cached,
        "cache_hit": active.hit,
        "prefilled_tokens": prompt if first else min(prompt, active.prefilled),
        "progress": 1.0 if first else round(min(1.0, active.prefilled / max(1, to_run)), 3),
        "made_tokens": generated,
        "max_tokens": active.max_tokens,
        "age_seconds": round(now - active.arrived, 3),
        "ttft_seconds": round(first - active.arrived, 3) if first else None,
        "tokens_per_second": (
            round((generated - 1) / (now - first), 2)
            if first and generated > 1 and now > first
            else None
        ),
        "resumes": active.deaths,
        "priority": active.priority,
        "endpoint": active.endpoint,
        "specprefill": sparse,
    }
