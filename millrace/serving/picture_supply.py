"""Pictures on their way to an engine that wants them, for requests that are running there.

Making one ready takes a while, so that it happens beside everything else; what an engine wanted that
is gone meanwhile is not for the next one, which is told of the request anew and asks again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from millrace.serving.engine_request import EngineRequest
from millrace.serving.in_flight import InFlight


class PictureSupply:
    def __init__(
        self,
        send: Callable[[memoryview], None],
        engine: Callable[[], object],
        failed: Callable[[InFlight, Exception], None],
    ) -> None:
        """`engine` tells which engine there is now; `failed` ends a request."""
        self._send = send
        self._engine = engine
        self._failed = failed
        self._tasks: set[asyncio.Task[None]] = set()

    def wanted(self, active: EngineRequest | None, digests: list[str]) -> None:
        """The engine waits for these; one that wants them for a request that has left asks again."""
        if not isinstance(active, InFlight):
            return
        task = asyncio.ensure_future(self._give(active, digests, self._engine()))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _give(self, active: InFlight, digests: list[str], engine: object) -> None:
        try:
            for digest in digests:
                if active.picture is None:
                    raise ValueError(f"it shows no picture {digest}")
                found = await active.picture(digest)
                if self._engine() is not engine:
                    return
                # Another request may wait for it, so that it is sent though this one may have ended.
                self._send(found)
        except (
            Exception
        ) as error:  # what is wrong with one request's picture is no other's business
            self._failed(active, error)
