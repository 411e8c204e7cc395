"""Running a backend: its door, and the process behind it, until a signal or until LocalAI is gone.

On SIGTERM or SIGINT running answers get the drain time to finish; a second signal ends at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable

import grpc
import msgspec

from millrace.config import EngineConfig
from millrace.errors import EngineUnavailable
from millrace.private_folder import PrivateFolder
from millrace.rpc.localai.door import BackendDoor
from millrace.rpc.localai.parent import interval_of, orphaned
from millrace.rpc.localai.settings import Name, Settings
from millrace.rpc.server import SIZES, listen, make_server
from millrace.serving.keys import is_exposed

log = logging.getLogger("millrace.rpc")
_PATIENCE = 30.0
"""Seconds that the process behind the door gets to end its engine and itself."""


async def serve(
    address: str,
    name: Name,
    base: EngineConfig,
    *,
    parent: int,
    token: str = "",
    drain: float = 10.0,
    on_listening: Callable[[int], None] = lambda port: None,
) -> None:
    """`parent` is the process whose end is this one's; `base` is what all engines are told alike."""
    interval = interval_of(os.environ)
    loop = asyncio.get_running_loop()
    server = make_server()
    port = listen(server, address)
    signals: asyncio.Queue[None] = asyncio.Queue()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signals.put_nowait, None)
    alone = asyncio.create_task(orphaned(interval, parent))
    asked = asyncio.create_task(signals.get())
    async with _inside(name, base, drain) as (inside, channel):
        ended = asyncio.create_task(inside.wait())
        server.add_generic_rpc_handlers((BackendDoor(channel, token).handlers(),))
        try:
            await server.start()
            _warn(address, token)
            on_listening(port)
            await asyncio.wait({alone, asked, ended}, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                raise EngineUnavailable(f"What has the model ended with status {ended.result()}.")
            if alone.done():
                log.warning("the process that started this backend is gone")
                drain = 0.0
            stopping = asyncio.create_task(server.stop(drain))
            again = asyncio.create_task(signals.get())
            await asyncio.wait({stopping, again}, return_when=asyncio.FIRST_COMPLETED)
            again.cancel()
        finally:
            for task in (alone, asked, ended):
                task.cancel()
            await server.stop(0)


@contextlib.asynccontextmanager
async def _inside(
    name: Name, base: EngineConfig, drain: float
) -> AsyncIterator[tuple[asyncio.subprocess.Process, grpc.aio.Channel]]:
    """The process that has the model, and the way to it."""
    folder = PrivateFolder()
    address = f"unix:{folder.path / 'inside.sock'}"
    settings = Settings(address=address, name=name, engine=base, drain=drain)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "millrace.rpc.localai.inside"),
        msgspec.json.encode(settings).decode(),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.DEVNULL,
    )
    try:
        async with grpc.aio.insecure_channel(address, options=SIZES) as channel:
            yield process, channel
    finally:
        if process.returncode is None:
            process.terminate()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), _PATIENCE)
        if process.returncode is None:
            process.kill()
            await process.wait()
        folder.remove()


def _warn(address: str, token: str) -> None:
    """Say of a backend that anybody who reaches it may use that it is one."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        exposed = is_exposed(host, ()) and not token
    except ValueError:
        return  # a name, which may be anything
    if exposed:
        log.warning(
            "listening on %s without a token: everybody who can reach this machine can use the "
            "model. Set LOCALAI_GRPC_AUTH_TOKEN here and for LocalAI.",
            host,
        )
