"""A model in this process: its event loop and its engine have threads of their own.

No interpreter can end while such an engine computes: MLX would take the process down. So whatever is
left open is closed before, by the program's end at the latest.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import os
import sys
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from millrace.config import EngineConfig
from millrace.errors import EngineUnavailable, MillraceError
from millrace.media.limits import MediaLimits
from millrace.serving.inprocess import ThreadConnection
from millrace.serving.media import MediaDesk
from millrace.serving.metrics import Metrics
from millrace.serving.model import ServedModel
from millrace.serving.model_launcher import open_model

T = TypeVar("T")
_INTERRUPTED = 130
"""The status of a program that is ended by Ctrl-C, as shells have it."""


class LocalModel:
    def __init__(self, config: EngineConfig) -> None:
        self._process = os.getpid()
        self._lock = threading.RLock()
        self._engines: list[ThreadConnection] = []
        self._model: ServedModel | None = None
        self._media: MediaDesk | None = None
        self._leaving = False
        self._ending: asyncio.Task[None] | None = None
        self._ended: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="millrace-front", daemon=True)
        self._thread.start()
        atexit.register(self._end_with_program)
        try:
            self.model = self.call(self._open(config))
        except BaseException:
            self.close()
            raise

    def start(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Run something in the loop; raises that the model is closed."""
        try:
            with self._lock:
                if self._forked:
                    raise EngineUnavailable(
                        "A model does not come along into a forked process. Load it there, in one that "
                        "is started with the method 'spawn'."
                    )
                if self._leaving:
                    raise _closed()
                return asyncio.run_coroutine_threadsafe(self._told(work), self._loop)
        except MillraceError:
            work.close()
            raise

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """The same, waited for. Whoever is interrupted no longer wants it."""
        future = self.start(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """End all of it. Where this is interrupted it goes on, and the program's end waits for it."""
        self.leave()
        if not self._forked:
            self._ended.result()
            self._thread.join()

    def leave(self) -> None:
        """Have it end, without waiting.

        An interrupt may come at any place in here, so each call asks the loop again, which begins once.
        """
        with self._lock:
            if self._forked or self._ended.done():
                return
            self._leaving = True
            with contextlib.suppress(RuntimeError):  # the loop closed meanwhile: it has ended
                self._loop.call_soon_threadsafe(self._begin_end)

    def _begin_end(self) -> None:
        if self._ending is None:
            self._ending = self._loop.create_task(self._end())

    @property
    def _forked(self) -> bool:
        """Whether this process has but a copy, without the threads."""
        return os.getpid() != self._process

    def _end_with_program(self) -> None:
        try:
            self.close()
        except KeyboardInterrupt:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):
                    stream.flush()
            os._exit(_INTERRUPTED)

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    async def _told(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            return await work
        except asyncio.CancelledError:
            if self._leaving:
                raise _closed() from None
            raise

    async def _open(self, config: EngineConfig) -> ServedModel:
        async def launch() -> ThreadConnection:
            self._engines.append(ThreadConnection(config))
            return self._engines[-1]

        # Whoever runs a model in a program of his own may show it all his files.
        self._media = MediaDesk(MediaLimits(folders=("/",), most=sys.maxsize))
        self._model = await open_model(
            config, launch, Metrics(), idle=3600.0, max_queue=sys.maxsize, media=self._media
        )
        await self._model.client.settled()
        return self._model

    async def _end(self) -> None:
        """Without help of another thread, since a program that ends starts none."""
        try:
            if self._model is not None:
                await self._model.client.stop()
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            for engine in self._engines:
                await engine.close(0)
            atexit.unregister(self._end_with_program)
            if self._model is not None:
                self._model.release()
            if self._media is not None:
                self._media.release()
        except BaseException as error:
            self._ended.set_exception(error)
        else:
            self._ended.set_result(None)
        finally:
            self._loop.call_soon(self._loop.stop)


def _closed() -> EngineUnavailable:
    return EngineUnavailable("This LLM is closed.")
