"""One rank of a group as the server sees it: its link, how it was last heard, and whether it is lost."""

from __future__ import annotations

import asyncio
import logging
from typing import Literal

from millrace.distributed.handshake import Refused
from millrace.distributed.messages import (
    BEAT_SECONDS,
    CANNOT_START,
    CONTROL,
    PEER_LOST,
    SILENT_SECONDS,
    About,
    Beat,
    Line,
    Look,
    Looked,
    Measure,
    Measured,
    Ping,
    ToWorker,
    encoder,
    from_worker,
)
from millrace.serving.connection import EngineGone, gone
from millrace.serving.ranks.link import Link, connect
from millrace.serving.ranks.silence import Silence
from millrace.serving.ranks.versions import others
from millrace.serving.suspicion import Cause

log = logging.getLogger("millrace.ranks")

RankState = Literal["unreachable", "waiting", "loading", "ready", "lost"]


class Member:
    def __init__(self, rank: int, address: tuple[str, int], secret: str) -> None:
        self.rank = rank
        self.address = address
        self._secret = secret
        self._link: Link | None = None
        self._hearing: asyncio.Task[None] | None = None
        self.beat = Beat("waiting")
        self.about: About | None = None
        self._silence: Silence | None = None
        """Since it was heard of, where it was at all."""
        self.problem = "it has not been reached yet"
        self._answer: asyncio.Future[Measured | Looked] | None = None

    @property
    def where(self) -> str:
        """As anybody may hear it who asks for the server's health; its address is in the log."""
        return f"rank {self.rank}"

    @property
    def state(self) -> RankState:
        if self._link is None:
            return "unreachable"
        if self.loss() is not None:
            return "lost"
        if self.beat.state == "waiting":
            return "waiting"
        return "ready" if self.beat.stage == "ready" else "loading"

    async def reach(self, role: str = CONTROL) -> None:
        """Raises OSError or Refused."""
        try:
            self._link = await connect(self.address, self._secret, role, self.rank)
        except (OSError, Refused) as error:
            problem = _in_words(error)
            if problem != self.problem:
                host, port = self.address
                log.warning("rank %d at %s:%d: %s (%s)", self.rank, host, port, problem, error)
            self.problem = problem
            raise
        self.problem = ""
        self.beat, self._silence = Beat("waiting"), Silence()
        self._hearing = asyncio.create_task(self._hear(self._link))

    async def _hear(self, link: Link) -> None:
        try:
            while (data := await link.receive()) is not None:
                if self._silence is not None:
                    self._silence.broken()
                match from_worker.decode(data):
                    case Beat() as beat:
                        self.beat = beat
                    case Line(text=text):
                        log.info("[rank %d] %s", self.rank, text)
                    case About() as about:
                        self.about = about
                        if differ := others(about.versions):
                            log.warning("%s runs other versions: %s", self.where, differ)
                    case Measured() | Looked() as answer:
                        if self._answer is not None and not self._answer.done():
                            self._answer.set_result(answer)
        except (Refused, ValueError) as error:
            self.problem = f"it said what is no message ({error})"
        self.problem = self.problem or "its connection is closed"

    def send(self, message: ToWorker) -> None:
        if self._link is not None:
            self._link.send(encoder.encode(message))

    def ping(self) -> None:
        self.send(Ping())

    async def asked(self, message: Measure | Look, seconds: float) -> Measured | Looked:
        """What it answers; raises TimeoutError."""
        self._answer = asyncio.get_running_loop().create_future()
        self.send(message)
        async with asyncio.timeout(seconds):
            while not self._answer.done():
                self.ping()
                await asyncio.wait({self._answer}, timeout=BEAT_SECONDS)
            return self._answer.result()

    def loss(self) -> EngineGone | None:
        """How it was lost; None as long as it is not."""
        if self._link is None:
            return EngineGone(f"{self.where} cannot be reached: {self.problem}", Cause.OUTSIDE)
        if self.beat.state == "ended":
            how = gone(self.beat.code)
            cause = Cause.OUTSIDE if self.beat.code == PEER_LOST else how.cause
            told = self.beat.error or str(how)
            return EngineGone(f"{self.where} has ended: {told}", cause)
        if self._hearing is not None and self._hearing.done():
            return EngineGone(f"{self.where} is gone: {self.problem}", Cause.OUTSIDE)
        if self.beat.silent > SILENT_SECONDS:
            return EngineGone(f"{self.where} is frozen", Cause.OUTSIDE)
        if self._silence is not None and self._silence.look() > SILENT_SECONDS:
            return EngineGone(f"{self.where} does not answer any more", Cause.OUTSIDE)
        return None

    @property
    def refusal(self) -> str | None:
        """Why it cannot have its part of the model, in its own words."""
        if self.beat.state == "ended" and self.beat.code == CANNOT_START:
            return f"{self.where}: {self.beat.error}"
        return None

    def close(self) -> None:
        if self._hearing is not None:
            self._hearing.cancel()
        if self._link is not None:
            self._link.close()
            self._link = None


def _in_words(error: OSError | Refused) -> str:
    if isinstance(error, Refused):
        return str(error)
    if isinstance(error, ConnectionRefusedError):
        return "no worker listens there"
    return "it does not answer"
