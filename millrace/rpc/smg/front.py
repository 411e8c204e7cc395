"""The worker's gRPC server, beside the HTTP one and with its life: it begins, drains and ends with it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from smg_grpc_proto.generated import mlx_engine_pb2_grpc, vllm_engine_pb2_grpc

from millrace.config import ServeConfig
from millrace.rpc.arrivals import MessageArrivals
from millrace.rpc.server import listen, make_server
from millrace.rpc.smg import health
from millrace.rpc.smg.callers import RoleInterceptor
from millrace.rpc.smg.engines import MLX, VLLM, MlxEngine, VllmEngine
from millrace.rpc.smg.worker import Worker
from millrace.serving.catalogue import ModelSpec
from millrace.serving.metrics import Metrics
from millrace.serving.quotas import Quotas
from millrace.serving.registry import Registry

log = logging.getLogger("millrace.rpc")
_add_vllm: Callable[[Any, Any], None] = vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server
_add_mlx: Callable[[Any, Any], None] = mlx_engine_pb2_grpc.add_MlxEngineServicer_to_server
_add_health: Callable[[Any, Any], None] = health_pb2_grpc.add_HealthServicer_to_server


class SmgFront:
    def __init__(
        self,
        registry: Registry,
        spec: ModelSpec,
        config: ServeConfig,
        quotas: Quotas,
        metrics: Metrics,
        address: str,
    ) -> None:
        """Opens the address; nothing is answered before `start`."""
        worker = self._worker = Worker(registry, spec, config, quotas, metrics)
        engine = config.smg_engine
        self._address = address
        self.cache_changed = worker.cache_changed
        self._arrivals = MessageArrivals(keyed=bool(config.api_keys))
        self._server = make_server(
            config.reader_timeout, [RoleInterceptor(worker.callers)], self._arrivals
        )
        self._ending: asyncio.Task[None] | None = None
        names = []
        if engine in ("vllm", "both"):
            _add_vllm(VllmEngine(worker), self._server)
            names.append(VLLM)
        if engine in ("mlx", "both"):
            _add_mlx(MlxEngine(worker), self._server)
            names.append(MLX)
        _add_health(health.HealthService(worker, names), self._server)
        reflection.enable_server_reflection(
            (*names, health.NAME, reflection.SERVICE_NAME), self._server
        )
        self._port = listen(self._server, address)
        self._names = names

    async def start(self) -> None:
        await self._server.start()
        host = self._address.rpartition(":")[0]
        log.info("gateways find a worker at %s:%d (%s)", host, self._port, ", ".join(self._names))

    def drain(self, seconds: float) -> None:
        """Take no more calls; those that run have so long to finish."""
        self._worker.drain()
        self._arrivals.cut()
        if self._ending is None:
            self._ending = asyncio.create_task(self._server.stop(seconds))

    def cut(self) -> None:
        """End the calls that still run."""
        self._worker.drain()
        self._ending = asyncio.create_task(self._server.stop(0))

    async def ended(self) -> None:
        """Wait until the last call is over."""
        self.drain(1.0)
        assert self._ending is not None
        await self._ending
