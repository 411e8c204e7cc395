"""Workers that a server starts itself, on its own machine or over ssh, and that end with it.

`python -m millrace.serving.ranks.local RANK ADDRESS PORT LEVEL PEERS`: the first line of its standard input
has the secret, and the first of its standard output is the port that it listens on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shlex
import signal
import sys

from millrace import logs
from millrace.config import GroupConfig, RankHost
from millrace.distributed.hostfile import is_here, peers_of
from millrace.errors import EngineUnavailable
from millrace.serving.ranks.worker import RankWorker

log = logging.getLogger("millrace.ranks")

_START_SECONDS = 60.0
_TRUSTS = "--trust-remote-code"


class StartedWorkers:
    """Workers that are started when they are wanted, and again when they have died."""

    def __init__(self, group: GroupConfig, *, trust_remote_code: bool, log_level: str) -> None:
        self._group = group
        self._trusts = trust_remote_code
        self._level = log_level
        self._running: dict[int, tuple[asyncio.subprocess.Process, int]] = {}

    def starts(self, rank: int) -> bool:
        """Whether the rank's worker is the server's to start; others wait where they are."""
        return self._group.started or bool(self._group.hosts[rank].ssh)

    async def port(self, rank: int) -> int:
        """Where the rank's worker listens."""
        found = self._running.get(rank)
        if found is not None and found[0].returncode is None:
            return found[1]
        process = await asyncio.create_subprocess_exec(
            *self._command(rank),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            # What its follower logs comes over the link, with its rank.
            stderr=asyncio.subprocess.DEVNULL,
            process_group=0,
        )
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(self._group.secret.encode() + b"\n")
        try:
            async with asyncio.timeout(_START_SECONDS):
                port = int(await process.stdout.readline())
        except BaseException as error:
            _kill(process)
            await process.wait()
            if not isinstance(error, TimeoutError | ValueError):
                raise
            command = shlex.join(self._command(rank))
            log.error("rank %d: '%s' ended with status %s", rank, command, process.returncode)
            raise EngineUnavailable("its worker cannot be started") from None
        self._running[rank] = process, port
        return port

    def _command(self, rank: int) -> list[str]:
        host = self._group.hosts[rank]
        command = [
            *(sys.executable, "-m", "millrace.serving.ranks.local"),
            *(str(rank), host.address, str(host.control), self._level),
            ",".join(peers_of(self._group)),
            *((_TRUSTS,) if self._trusts else ()),
        ]
        if not host.ssh or is_here(host.ssh.rpartition("@")[2]):
            return command
        # As mlx.launch does it: the same interpreter, in the same folder.
        there = f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(command)}"
        return ["ssh", "-T", "-o", "BatchMode=yes", host.ssh, there]

    def replace(self, rank: int) -> None:
        """One that does not answer: another takes its place."""
        found = self._running.pop(rank, None)
        if found is not None:
            _kill(found[0])

    async def end(self) -> None:
        running, self._running = self._running, {}
        for process, _ in running.values():
            _kill(process)
            await process.wait()


def _kill(process: asyncio.subprocess.Process) -> None:
    """With its follower, which may be frozen: that one would not see that its worker is gone."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.killpg(process.pid, signal.SIGKILL)


def hosts_of(count: int) -> tuple[RankHost, ...]:
    """Ranks on this machine; their ports are chosen when they are started."""
    return tuple(RankHost(address="127.0.0.1", port=0, control=0) for _ in range(count))


async def _serve(worker: RankWorker, address: str, port: int) -> None:
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(sys.stdin.fileno(), _heard, ended)

    def listening(port: int) -> None:
        print(port, flush=True)

    serving = asyncio.create_task(worker.serve(address, port, listening))
    waiting = asyncio.create_task(ended.wait())
    await asyncio.wait({serving, waiting}, return_when=asyncio.FIRST_COMPLETED)
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)


def _heard(ended: asyncio.Event) -> None:
    if not os.read(sys.stdin.fileno(), 1024):
        ended.set()


def main() -> None:
    rank, address, port, level, peers, *rest = sys.argv[1:]
    logs.setup(level, "text")
    # An interrupt at a terminal is for the server, which ends its ranks in good order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    secret = b""
    while not secret.endswith(b"\n"):
        more = os.read(0, 1)
        if not more:
            return
        secret += more
    worker = RankWorker(
        int(rank),
        secret[:-1].decode(),
        peers=[peer for peer in peers.split(",") if peer],
        trust_remote_code=_TRUSTS in rest,
    )
    asyncio.run(_serve(worker, address, int(port)))


if __name__ == "__main__":
    main()
