"""A worker's follower: the process that has a part of a model, and what it says of itself."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Callable

import msgspec

from millrace.config import EngineConfig
from millrace.distributed.environment import SECRET
from millrace.distributed.messages import Beat
from millrace.flight import Recording
from millrace.serving.ranks.silence import Silence
from millrace.serving.watch import BUSY_SHARE, FIRST_BEAT_SECONDS, processor_time

_LONGEST_LINE = 1 << 20


class Child:
    def __init__(
        self, process: asyncio.subprocess.Process, recording: Recording, tell: Callable[[str], None]
    ) -> None:
        """`tell` hears the lines of its log."""
        self._process = process
        self._recording = recording
        self._tell = tell
        self._facts: dict[str, object] = {"stage": "starting"}
        self._reading = [
            asyncio.create_task(self._read_facts()),
            asyncio.create_task(self._read_log()),
        ]
        self._beats = 0
        self._silent = Silence()
        self._computed: float | None = None

    @classmethod
    async def launch(cls, config: EngineConfig, tell: Callable[[str], None]) -> Child:
        recording = Recording()
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "millrace.engine.ranks.follower"),
                msgspec.json.encode(shown(config)).decode(),
                str(recording.file),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=environment_of(config),
                pass_fds=(recording.file,),
                limit=_LONGEST_LINE,
            )
        except BaseException:
            recording.close()
            raise
        return cls(process, recording, tell)

    def beat(self) -> Beat:
        """How it is now."""
        code = self._process.returncode
        return Beat(
            state="running" if code is None else "ended",
            stage=str(self._facts.get("stage", "")),
            pid=self._process.pid,
            silent=self._silence() if code is None else 0.0,
            turns=self._number("turns"),
            checks=self._number("checks"),
            weight_bytes=self._number("weight_bytes"),
            peak_bytes=self._number("peak"),
            code=code,
            error=str(self._facts.get("error", "")),
        )

    def _number(self, name: str) -> int:
        value = self._facts.get(name)
        return value if isinstance(value, int) else 0

    def _silence(self) -> float:
        """Seconds without a heartbeat, in which it has not computed either."""
        beats = self._recording.read().beats
        if beats != self._beats:
            self._beats, self._computed = beats, None
            self._silent.broken()
            return 0.0
        silent = self._silent.look()
        if not beats and silent < FIRST_BEAT_SECONDS:
            return 0.0
        computed = processor_time(self._process.pid)
        if self._computed is None:
            self._computed = computed
        if computed is not None and self._computed is not None and silent > 1:
            busy = computed - self._computed >= BUSY_SHARE * silent
            return 0.0 if busy else silent
        return silent

    async def _read_facts(self) -> None:
        assert self._process.stdout is not None
        while line := await _line(self._process.stdout):
            with contextlib.suppress(ValueError):  # whatever a library prints
                found = json.loads(line)
                if isinstance(found, dict):
                    self._facts |= found

    async def _read_log(self) -> None:
        assert self._process.stderr is not None
        while line := await _line(self._process.stderr):
            self._tell(line.decode(errors="replace").rstrip("\n"))

    async def ended(self) -> None:
        await self._process.wait()
        # What it said last is still to be read.
        await asyncio.wait(self._reading, timeout=1.0)

    async def end(self) -> None:
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()
        for task in self._reading:
            task.cancel()
        await asyncio.gather(*self._reading, return_exceptions=True)
        self._recording.close()


async def _line(stream: asyncio.StreamReader) -> bytes:
    try:
        return await stream.readline()
    except ValueError:  # longer than any line should be: what has come of it is gone
        return b"(a line that is too long)\n"


def shown(config: EngineConfig) -> EngineConfig:
    """What of it may stand on a command line."""
    if config.seat is None:
        return config
    return msgspec.structs.replace(config, seat=msgspec.structs.replace(config.seat, secret=""))


def environment_of(config: EngineConfig) -> dict[str, str]:
    """A rank's environment, with its secret in it: ranks that share a machine share its cores."""
    found = dict(os.environ) | {"TOKENIZERS_PARALLELISM": "false"}
    if config.seat is not None:
        found[SECRET] = config.seat.secret
    if config.seat is not None and config.group is not None and not config.seat.alone:
        here = config.group.hosts[config.seat.rank].address
        ranks = sum(h.address == here for h in config.group.hosts)
        cores = max(1, (os.cpu_count() or 1) // ranks)
        found.setdefault("OPENBLAS_NUM_THREADS", str(cores))
    return found
