"""Strangers' pictures for the whole server: fetched, looked at in worker processes, known by digest.

Owns what is the same for every model. A picture is held as the file that came; what was found out
about files is remembered, so that the next turn of a conversation decodes nothing again.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from millrace.errors import BadPicture, DeadlineExceeded
from millrace.fair_executor import FairExecutor
from millrace.media.claimed_size import claimed_pixels
from millrace.media.fetch import Fetcher
from millrace.media.limits import MediaLimits
from millrace.media.sources import Inline, Local, Remote, read_local, source_of
from millrace.media.worker import BrokenPicture, SeenPicture, reply_decoder, task_of
from millrace.worker_pool import WorkerDied, WorkerPool

T = TypeVar("T")
_PROCESSES = 2
"""Processes that decode one caller's pictures; one more is for other callers."""
_WAITING_PER_CALLER, _WAITING = 256, 1024
"""Pictures that wait, and how many of them one caller may have."""
_PIXELS_PER_SECOND = 20e6
"""About what decoders manage; it orders the queue and decides nothing else."""
_REMEMBERED = 4096
"""Files about which is known what they hold, 200 bytes each."""


@dataclass(frozen=True)
class PictureFile:
    """A picture that can be decoded, as the file that came."""

    digest: str
    width: int
    height: int
    data: bytes
    low: bool = False
    """Few of its pixels are enough, and the digest is of those."""
    moving: bool = False
    """It is a video, and the digest is of the frames that are seen."""


class MediaDesk:
    def __init__(self, limits: MediaLimits | None = None, fetcher: Fetcher | None = None) -> None:
        self.limits = limits or MediaLimits()
        self._fetcher = fetcher or Fetcher(self.limits)
        config = msgspec.json.encode(self.limits).decode()
        self._pool = WorkerPool(
            ["-m", "millrace.media.worker", config], most=_PROCESSES, work="picture"
        )
        # Threads of their own: files and decoders of strangers must not hold up other work.
        self._threads = FairExecutor(
            _PROCESSES + 1,
            "pictures",
            per_caller=_PROCESSES,
            waiting_per_caller=_WAITING_PER_CALLER,
            waiting=_WAITING,
        )
        self._known: OrderedDict[tuple[bytes, bool, bool], SeenPicture] = OrderedDict()

    async def close(self) -> None:
        await asyncio.to_thread(self.release)

    def release(self) -> None:
        self._fetcher.close()
        self._pool.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def find(
        self, source: str, *, low: bool = False, moving: bool = False
    ) -> tuple[PictureFile, int]:
        """The picture at a source, or video, and how many bytes were fetched from the web for it."""
        data, was_fetched = await self._file(source)
        seen = await self._look(data, low, moving)
        file = PictureFile(seen.digest, seen.width, seen.height, data, low, moving)
        return file, len(data) if was_fetched else 0

    async def _file(self, text: str) -> tuple[bytes, bool]:
        """What is at a source, and whether it was fetched from the web."""
        match await self._run(source_of, text, self.limits):
            case Inline(data):
                return data, False
            case Local(path):
                return await self._run(read_local, path, self.limits), False
            case Remote(url):
                return await self._fetcher.fetch(url), True

    async def _look(self, data: bytes, low: bool, moving: bool) -> SeenPicture:
        key = await self._run(_key, data), low, moving
        if (known := self._known.get(key)) is not None:
            self._known.move_to_end(key)
            return known
        expected = (claimed_pixels(data) or len(data)) / _PIXELS_PER_SECOND
        work = functools.partial(self._decoded, data, low, moving)
        seen = await asyncio.wrap_future(self._threads.submit_expected(expected, work))
        self._known[key] = seen
        if len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)
        return seen

    def _decoded(self, data: bytes, low: bool, moving: bool) -> SeenPicture:
        try:
            reply: SeenPicture | BrokenPicture = reply_decoder.decode(
                self._pool.run(task_of(data, low, moving), self.limits.decode_seconds)
            )
        except DeadlineExceeded:
            seconds = self.limits.decode_seconds
            raise BadPicture(f"The picture was not decoded within {seconds:g} seconds.") from None
        except WorkerDied:
            raise BadPicture("The picture cannot be decoded: its decoder broke down.") from None
        if isinstance(reply, BrokenPicture):
            raise BadPicture(reply.message)
        return reply

    async def _run(self, work: Callable[..., T], *given: object) -> T:
        return await asyncio.wrap_future(
            self._threads.submit_expected(0.0, functools.partial(work, *given))
        )


def _key(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=32).digest()
