"""Running the HTTP server, and ending it in good order.

On SIGTERM or SIGINT the server stops accepting, running streams get the drain time to finish, those
that have not are cut with an error event, and the engine ends last. A second signal cuts at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import uvicorn

from millrace import descriptors, gc_settings
from millrace.api.app import create_app
from millrace.api.body import READ_AND_DROPPED
from millrace.api.cache_warming import warm_up
from millrace.api.connections import ConnectionCount, counted_protocol
from millrace.api.context import Context
from millrace.errors import EngineUnavailable, MillraceError
from millrace.fair_executor import FairExecutor
from millrace.serving.registry import Registry

log = logging.getLogger("millrace.api")
_THREADS, _THREADS_PER_CALLER = 256, 64
"""Threads that prepare requests. They are started when needed; some wait for worker processes, and
those of one caller must leave threads for the others."""
_TURN = 0.001
"""Seconds that a thread may keep the interpreter's lock while the event loop wants it."""
_LAST_WORDS = 1.0
"""Seconds that answers which were cut have to leave."""
_ACCEPTED = 2
"""Connections that are taken in one round of the event loop: a token takes several to get to its client."""
_BACKLOG = 2048
"""Connections that wait to be."""
_NO_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_QUIET = 60.0
"""Seconds between two lines of the log that say the same."""
_LOOK = 0.1
"""Seconds between two looks at what is left when the server ends."""
_LAST_COMERS = 3.0
"""Seconds for which those that wait are still taken when the server ends."""


class _Uvicorn(uvicorn.Server):
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        # asyncio takes as many at once as may wait, and is told one number for both.
        for listener in sockets or ():
            listener.listen(_BACKLOG)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # Who is connected already gets an answer, if only that the server ends.
        deadline = time.monotonic() + _LAST_COMERS
        waiting = select.poll()
        for listener in sockets or ():
            waiting.register(listener, select.POLLIN)
        while waiting.poll(0) and time.monotonic() < deadline and not self.force_exit:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)  # and what they have sent is read
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # ours are installed by `serve`


class _Unhandled:
    """What happens in the event loop and nobody handles.

    Where there is no descriptor for a connection, asyncio tries again after a second, and says so each
    time: one line a minute will do.
    """

    def __init__(self) -> None:
        self._said = -_QUIET

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in _NO_RESOURCES:
            loop.default_exception_handler(context)
        elif (now := time.monotonic()) > self._said + _QUIET:
            self._said = now
            log.error("connections wait to be accepted: %s", descriptors.explain(error))


class Beside(Protocol):
    """Another server in this process, which lives as long as the HTTP one."""

    async def start(self) -> None: ...

    def drain(self, seconds: float) -> None:
        """Take no more calls; those that run have so long to finish."""

    def cut(self) -> None:
        """End what still runs."""

    async def ended(self) -> None:
        """Wait until the last call is over."""


async def serve(
    context: Context,
    listener: socket.socket,
    on_listening: Callable[[], None],
    beside: Sequence[Beside] = (),
) -> None:
    """Serve until a signal, or until an engine fails to start for the first time."""
    config = context.config
    beside = (context.feed, context.log_lines, *beside)
    count = ConnectionCount(descriptors.limit(), config.max_connections_per_address)
    server = _Uvicorn(
        uvicorn.Config(
            create_app(context),
            http=counted_protocol(config.reader_timeout, count, READ_AND_DROPPED * config.max_body),
            ws="none",
            log_config=None,
            log_level="warning",
            access_log=False,
            lifespan="off",
            timeout_keep_alive=75,
            timeout_graceful_shutdown=None,
            backlog=_ACCEPTED,
        )
    )
    loop = asyncio.get_running_loop()
    loop.set_default_executor(FairExecutor(_THREADS, "millrace", per_caller=_THREADS_PER_CALLER))
    loop.set_exception_handler(_Unhandled())
    sys.setswitchinterval(_TURN)
    drain = _Drain(server, context.registry, config.drain_timeout, beside)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, drain.begin)
    watch = asyncio.create_task(_watch(context, server, on_listening))
    try:
        for other in beside:
            await other.start()
        await server.serve(sockets=[listener])
        for other in beside:
            await other.ended()
        if watch.done() and watch.exception():
            await watch
    finally:
        watch.cancel()
        await context.jobs.finished(config.drain_timeout)
        await context.registry.stop()
        await context.jobs.finished(1.0)


async def _watch(context: Context, server: uvicorn.Server, on_ready: Callable[[], None]) -> None:
    try:
        first = context.registry.at_start
        for instance in first:
            await instance.settled.wait()
            if instance.failure is not None and len(first) == 1:
                raise instance.failure
        gc_settings.settle()
        on_ready()
        if context.warm:
            for instance in first:
                await _warm(context, instance.spec.name)
    except BaseException:
        server.should_exit = True
        raise


async def _warm(context: Context, name: str) -> None:
    try:
        lease = await context.registry.lease(name)
    except MillraceError as error:
        log.warning("--warm: %s", error.message)
        return
    try:
        await warm_up(lease.model, context.warm)
    finally:
        lease.release()


class _Drain:
    def __init__(
        self,
        server: uvicorn.Server,
        registry: Registry,
        timeout: float,
        beside: Sequence[Beside],
    ) -> None:
        self._server = server
        self._beside = beside
        self._registry = registry
        self._timeout = timeout

    def begin(self) -> None:
        loop = asyncio.get_running_loop()
        if self._server.should_exit:
            self._cut()
            return
        self._server.should_exit = True
        if running := self._running():
            log.info(
                "ending: %s %g s to finish; a second Ctrl-C ends %s at once",
                "a running request has" if running == 1 else f"{running} running requests have",
                self._timeout,
                "it" if running == 1 else "them",
            )
        else:
            log.info("ending: no request is running, models are let go")
        for other in self._beside:
            other.drain(self._timeout + _LAST_WORDS)
        loop.call_later(self._timeout, self._cut)
        self._waiting = loop.create_task(self._until_alone())

    def _running(self) -> int:
        return sum(len(m.client.in_flight) for m in self._registry.all())

    async def _until_alone(self) -> None:
        """Requests that are still being prepared for clients that are gone are not waited for."""
        await asyncio.sleep(_LAST_COMERS)
        while self._server.server_state.connections or self._running():
            await asyncio.sleep(_LOOK)
        self._cut()

    def _cut(self) -> None:
        loop = asyncio.get_running_loop()
        for model in self._registry.all():
            model.client.fail_all(EngineUnavailable("The server is shutting down."))
            # Requests that are being prepared, whatever their template or picture takes, end too.
            loop.run_in_executor(None, model.release)
        # Answers get a moment to leave; a client that does not read holds nobody up.
        loop.call_later(_LAST_WORDS, self._force)

    def _force(self) -> None:
        self._server.force_exit = True
        for other in self._beside:
            other.cut()
