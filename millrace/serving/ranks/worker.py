"""A worker: waits for a server that has a part of a model for it, and has a process of its own load that.

It outlives what it loads. When the server lets go of the model, or is gone, the process ends with all its
memory and the worker waits for the next.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from millrace.config import EngineConfig
from millrace.distributed.greetings import Greetings
from millrace.distributed.handshake import Hello, Refused
from millrace.distributed.hostfile import among
from millrace.distributed.messages import (
    BEAT_SECONDS,
    CANNOT_START,
    CONTROL,
    SILENT_SECONDS,
    VISIT,
    About,
    Beat,
    Echo,
    FromWorker,
    Line,
    Look,
    Looked,
    Measure,
    Ping,
    Probe,
    Start,
    Stop,
    ToWorker,
    encoder,
    to_worker,
)
from millrace.errors import MillraceError, ModelError, SetupError
from millrace.models import store
from millrace.models.device import host_memory
from millrace.models.resolve import resolve
from millrace.serving.ranks.child import Child
from millrace.serving.ranks.files import difference, files_of
from millrace.serving.ranks.link import Link, accept
from millrace.serving.ranks.probing import measure
from millrace.serving.ranks.silence import Silence
from millrace.serving.ranks.versions import here

log = logging.getLogger("millrace.serving")

_VISIT_SECONDS = 120.0
_MOST_GREETINGS = 32
"""Handshakes that run at a time."""


class RankWorker:
    def __init__(
        self,
        rank: int,
        secret: str,
        *,
        peers: Sequence[str] = (),
        model: str | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        """`peers` are the only addresses from which it is spoken to, if there are any. `model` is where the
        model's files are here, if not where the server has them."""
        self.rank = rank
        self._secret = secret
        self._peers = peers
        self._greetings = Greetings(_MOST_GREETINGS)
        self._refused = ""
        self._model = model
        self._trusts = trust_remote_code
        self._link: Link | None = None
        self._child: Child | None = None
        self._beat = Beat("waiting")
        self._loads = asyncio.Lock()

    async def serve(self, host: str, port: int, listening: Callable[[int], None]) -> None:
        """Until it is cancelled."""
        try:
            server = await asyncio.start_server(self._connected, host, port)
        except OSError as error:
            raise SetupError(
                f"Rank {self.rank} cannot listen on {host}:{port}: {error.strerror or error}."
            ) from None
        listening(server.sockets[0].getsockname()[1])
        try:
            async with server:
                await server.serve_forever()
        finally:
            if self._link is not None:
                self._link.close()
            await self._release()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = Link(reader, writer)
        peer = str(writer.get_extra_info("peername", ("somebody",))[0])
        pending = self._greetings.enter(peer, link.close)

        async def problem_of(hello: Hello) -> str | None:
            # Names are looked up for callers that have the secret only: strangers cannot cause that.
            return await asyncio.to_thread(self._stranger, peer) or self._problem(hello)

        try:
            hello = await accept(link, self._secret, pending, problem_of)
        except (Refused, OSError) as error:
            reason = error if str(error) and pending.spoke else "it sent nothing"
            told = f"{peer} is not this group's server: {reason}"
            # A server tries again and again.
            log.log(logging.DEBUG if told == self._refused else logging.WARNING, "%s", told)
            self._refused = told
            link.close()
            return
        finally:
            self._greetings.leave(pending)
        if hello.role == VISIT:
            await self._answer(link)
            return
        log.info("rank %d has a server", self.rank)
        self._link = link
        beating: asyncio.Task[None] | None = None
        try:
            self._say(link, await asyncio.to_thread(_about))
            beating = asyncio.create_task(self._keep_beating(link))
            await self._obey(link)
        finally:
            if beating is not None:
                beating.cancel()
            link.close()
            await self._release()
            self._link = None
            log.info("rank %d waits for a server", self.rank)

    def _stranger(self, peer: str) -> str | None:
        if not self._peers or among(peer, self._peers):
            return None
        return (
            f"rank {self.rank} does not know the address {peer}, which its hostfile does not have; "
            "give all ranks a MILLRACE_RANKS_SECRET, or write the hostfile with the addresses in use"
        )

    def _problem(self, hello: Hello) -> str | None:
        if hello.role not in (CONTROL, VISIT):
            return "it wants something else"
        if hello.rank != self.rank:
            return f"it looks for rank {hello.rank}, and this is rank {self.rank}"
        if hello.role == CONTROL and self._link is not None:
            # One that has lost its way here is forgotten before long, and may come again.
            return "it has a model of another server, or another model of this one"
        return None

    async def _answer(self, link: Link) -> None:
        """One who only looks: whatever runs here goes on."""
        try:
            self._say(link, await asyncio.to_thread(_about))
            async with asyncio.timeout(_VISIT_SECONDS):
                while (data := await link.receive()) is not None:
                    match to_worker.decode(data):
                        case Probe(data=probe, echo=echo):
                            self._say(link, Echo(probe if echo else b""))
                            await link.drained()
                        case Measure(rank=rank, address=address, port=port):
                            self._say(link, await measure((address, port), self._secret, rank))
                        case Look(config=config, files=files):
                            self._say(link, await self._looked(Start(config, files)))
                        case Ping():
                            self._say(link, self._child.beat() if self._child else self._beat)
                        case _:
                            break
        except (OSError, Refused, ValueError) as error:
            log.warning("a visit was broken off: %s", error)
        finally:
            link.close()

    async def _obey(self, link: Link) -> None:
        while True:
            try:
                data = await _heard(link)
            except TimeoutError:
                log.warning("the server has not been heard of for %.1f s", SILENT_SECONDS)
                return
            except Refused as error:
                log.warning("the server said what is no message: %s", error)
                return
            if data is None:
                return
            try:
                message: ToWorker = to_worker.decode(data)
            except ValueError as error:
                log.warning("the server said what is no message: %s", error)
                return
            match message:
                case Start():
                    await self._start(link, message)
                case Stop():
                    await self._release()
                case _:
                    pass

    async def _keep_beating(self, link: Link) -> None:
        while True:
            self._say(link, self._child.beat() if self._child else self._beat)
            await asyncio.sleep(BEAT_SECONDS)

    async def _start(self, link: Link, start: Start) -> None:
        await self._release()
        self._beat = Beat("running", "looking for the model")
        try:
            config = await asyncio.to_thread(self._found, start)
            self._child = await Child.launch(config, lambda line: self._tell(link, line))
        except (MillraceError, OSError) as error:
            self._beat = Beat("ended", code=CANNOT_START, error=str(error))

    async def _looked(self, start: Start) -> Looked:
        try:
            await asyncio.to_thread(self._found, start)
        except (MillraceError, OSError) as error:
            return Looked(str(error))
        return Looked()

    def _tell(self, link: Link, line: str) -> None:
        print(line, file=sys.stderr, flush=True)
        self._say(link, Line(line))

    def _found(self, start: Start) -> EngineConfig:
        """What the follower is told: the model where it lies here."""
        config = start.config
        if config.trust_remote_code and not self._trusts:
            raise ModelError("It was not started with --trust-remote-code, which the model needs.")
        if self._model is not None:
            folder = resolve(self._model, download=False).path
        elif Path(config.model).is_dir():
            folder = Path(config.model)
        else:
            try:
                folder = resolve(config.name, download=False).path
            except MillraceError:
                raise ModelError(
                    f"The model is neither at {config.model} nor known as '{config.name}' there. "
                    "Copy it, or tell the worker with --model where it is."
                ) from None
        if (problem := difference(start.files, files_of(folder))) is not None:
            raise ModelError(f"The model in {folder} is not the server's: {problem}.")
        return msgspec.structs.replace(config, model=str(folder))

    def _say(self, link: Link, message: FromWorker) -> None:
        with contextlib.suppress(OSError, ValueError):
            link.send(encoder.encode(message))

    async def _release(self) -> None:
        async with self._loads:
            child, self._child = self._child, None
            self._beat = Beat("waiting")
            if child is not None:
                await child.end()


def _about() -> About:
    return About(here(), host_memory() or 0, tuple(store.names()))


async def _heard(link: Link) -> bytes | None:
    """The server's next message; raises TimeoutError if there is none for too long."""
    silence, receiving = Silence(), asyncio.ensure_future(link.receive())
    try:
        while not receiving.done():
            await asyncio.wait({receiving}, timeout=BEAT_SECONDS)
            if not receiving.done() and silence.look() > SILENT_SECONDS:
                raise TimeoutError
        return receiving.result()
    finally:
        receiving.cancel()
