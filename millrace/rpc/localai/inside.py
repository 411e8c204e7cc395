"""The process behind a backend's door: it has the model, and ends when the door is gone.

Started with the address to listen on and its settings as JSON; its standard input is a pipe that
nobody writes to, whose end is this process's.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import msgspec

from millrace import gc_settings, logs
from millrace.fair_executor import FairExecutor
from millrace.media.limits import MediaLimits
from millrace.rpc.localai.holder import Holder
from millrace.rpc.localai.service import Backend
from millrace.rpc.localai.settings import Settings
from millrace.rpc.server import listen, make_server
from millrace.serving.media import MediaDesk
from millrace.serving.metrics import Metrics
from millrace.serving.model_launcher import Workplace

_THREADS = 64
"""Threads that prepare requests. LocalAI is the only caller."""
_TURN = 0.001
"""Seconds that a thread may keep the interpreter's lock while the event loop wants it."""


async def serve(settings: Settings) -> None:
    loop = asyncio.get_running_loop()
    loop.set_default_executor(FairExecutor(_THREADS, "millrace"))
    sys.setswitchinterval(_TURN)
    ended = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, ended.set)
    loop.add_signal_handler(signal.SIGINT, lambda: None)  # a terminal's is for the door to act on
    loop.add_reader(sys.stdin.fileno(), _heard, ended)
    workplace = Workplace()
    # LocalAI fetches what is to be fetched, and sends pictures themselves.
    media = MediaDesk(MediaLimits(remote=False))
    holder = Holder(settings.engine, workplace, Metrics(), media, settings.drain)
    server = make_server()
    server.add_generic_rpc_handlers((Backend(holder, settings.name).handlers(),))
    try:
        listen(server, settings.address)
        await server.start()
        gc_settings.settle()
        await ended.wait()
    finally:
        loop.remove_reader(sys.stdin.fileno())
        await server.stop(0)
        await holder.stop()
        await media.close()
        workplace.remove()


def _heard(ended: asyncio.Event) -> None:
    if not os.read(sys.stdin.fileno(), 1024):
        ended.set()


def main() -> None:
    settings = msgspec.json.decode(sys.argv[1], type=Settings)
    logs.setup(settings.engine.log_level, settings.engine.log_format)
    asyncio.run(serve(settings))


if __name__ == "__main__":
    main()
