"""gRPC's own health service: the truth about the model, asked once or watched."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from typing import Any

from grpc_health.v1 import health_pb2

from millrace.errors import NotFound
from millrace.rpc.smg.worker import Worker

messages: Any = health_pb2
NAME = "grpc.health.v1.Health"
_LOOK = 0.5
"""Seconds between two looks for those who watch."""


class HealthService:
    def __init__(self, worker: Worker, services: Collection[str]) -> None:
        self._worker = worker
        self._services = {"", *services}

    async def Check(self, wire: Any, _context: Any) -> Any:
        if wire.service not in self._services:
            raise NotFound(f"There is no service '{wire.service[:200]}' here.")
        return self._answer(wire.service)

    async def List(self, _wire: Any, _context: Any) -> Any:
        return messages.HealthListResponse(
            statuses={service: self._answer(service) for service in self._services}
        )

    async def Watch(self, wire: Any, _context: Any) -> AsyncIterator[Any]:
        told = None
        while True:
            last, answer = self._worker.draining, self._answer(wire.service)
            if answer != told:
                told = answer
                yield answer
            if last:
                return
            await asyncio.sleep(_LOOK)

    def _answer(self, service: str) -> Any:
        kinds = messages.HealthCheckResponse
        if service not in self._services:
            return kinds(status=kinds.SERVICE_UNKNOWN)
        serving = self._worker.trouble() is None
        return kinds(status=kinds.SERVING if serving else kinds.NOT_SERVING)
