"""Opening a model: from a folder to a ServedModel whose engine is on its way up."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import shutil
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

from millrace.config import EngineConfig
from millrace.errors import ModelError
from millrace.models.window import read_config, window_of
from millrace.serving.admission import Admission
from millrace.serving.client import EngineClient
from millrace.serving.connection import Connection, ProcessConnection
from millrace.serving.metrics import Metrics
from millrace.serving.model import ServedModel
from millrace.text.tasks import TextSide, TextSideConfig


class Workplace:
    """A private folder for the sockets of this server's engines, removed at the end."""

    def __init__(self) -> None:
        self._folder = _private_folder()
        self._numbers = itertools.count()

    def launcher(self, config: EngineConfig) -> Callable[[], Awaitable[Connection]]:
        async def launch() -> Connection:
            if not self._folder.is_dir():  # whatever tidies up temporary files took it away
                self._folder = _private_folder()
            # A fresh socket for every engine: nothing of a dead one can be heard by the next.
            file = self._folder / f"engine-{next(self._numbers)}.sock"
            return await ProcessConnection.launch(config, file)

        return launch

    def remove(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


def _private_folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="millrace-"))


async def open_model(
    config: EngineConfig,
    launch: Callable[[], Awaitable[Connection]],
    metrics: Metrics,
    *,
    idle: float,
    max_queue: int,
) -> ServedModel:
    """Start the engine first, since it takes longest, and read the text side meanwhile."""
    window = window_of(read_config(Path(config.model)), config.context)
    admission = Admission(config.max_running, max_queue)
    client = EngineClient(launch, admission, metrics.of(config.name), idle=idle)
    await client.start()
    side = TextSide(
        TextSideConfig(
            folder=config.model,
            window=window,
            tool_format=config.tool_format,
            reasoning_format=config.reasoning_format,
            strip_volatile=config.strip_volatile,
        )
    )
    # What grammars need is read now, since it holds up everything else while it is.
    with contextlib.suppress(ModelError):
        await asyncio.to_thread(side.read_ahead)
    return ServedModel(config.name, side, client)
