"""Opening a model: from a folder to a ServedModel whose engine is on its way up."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from millrace.config import EngineConfig
from millrace.errors import ModelError, SetupError
from millrace.models.window import read_config, window_of
from millrace.serving.admission import Admission
from millrace.serving.client import EngineClient
from millrace.serving.connection import Connection, ProcessConnection
from millrace.serving.metrics import Metrics
from millrace.serving.model import ServedModel
from millrace.serving.ranges import MOST
from millrace.serving.request import in_range
from millrace.text.reading import described
from millrace.text.tasks import TextSide, TextSideConfig

log = logging.getLogger("millrace.serving")


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
    defaults: Mapping[str, float] | None = None,
) -> ServedModel:
    """Start the engine first, since it takes longest, and read the text side meanwhile."""
    check_defaults(defaults or {})
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
    log.info("%s: %s", config.name, described(side.dialect.format))
    return ServedModel(config.name, side, client, defaults)


def check_defaults(defaults: Mapping[str, float]) -> None:
    """The server's own defaults are held to what requests are held to."""
    for name, value in defaults.items():
        fits = in_range(name, value)
        if name == "max_tokens":
            fits = isinstance(value, int) and 1 <= value <= MOST
        if not fits:
            option = name.replace("_", "-")
            raise SetupError(f"--{option} {value} is out of range (docs/api.md has the ranges).")
