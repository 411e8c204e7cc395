"""What the server and its workers hold for a rank: given back however its start ends."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import Process
from typing import Any, cast

import pytest

from millrace.config import GroupConfig
from millrace.distributed.messages import CONTROL
from millrace.flight import Recording
from millrace.serving.ranks import local
from millrace.serving.ranks import worker as module
from millrace.serving.ranks.child import Child
from millrace.serving.ranks.link import connect
from millrace.serving.ranks.local import StartedWorkers, hosts_of
from millrace.serving.ranks.worker import RankWorker

PATIENCE = 60.0


class _Mute(StartedWorkers):
    """Whose workers never say where they listen."""

    def _command(self, rank: int) -> list[str]:
        return [sys.executable, "-c", "import time; time.sleep(600)"]


def test_a_worker_that_is_starting_when_its_model_is_let_go_of_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[Process] = []
    launch = asyncio.create_subprocess_exec

    async def noted(*args: Any, **options: Any) -> Process:
        started.append(await launch(*args, **options))
        return started[-1]

    async def scene() -> None:
        group = GroupConfig(hosts=hosts_of(2), backend="ring", started=True, secret="s")
        workers = _Mute(group, trust_remote_code=False, log_level="info")
        monkeypatch.setattr(local.asyncio, "create_subprocess_exec", noted)
        asking = asyncio.create_task(workers.port(1))
        async with asyncio.timeout(PATIENCE):
            while not started:
                await asyncio.sleep(0.01)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        ended = started[0].returncode is not None
        await workers.end()
        if not ended:
            started[0].kill()
            await started[0].wait()
        assert asking.cancelled() and ended

    asyncio.run(scene())


class _Frozen(StartedWorkers):
    """Whose workers have followers that do not run."""

    def _command(self, rank: int) -> list[str]:
        follower = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"
        program = (
            "import os, subprocess, sys, time\n"
            f"frozen = subprocess.Popen([sys.executable, '-c', {follower!r}])\n"
            "os.waitpid(frozen.pid, os.WUNTRACED)\n"
            "print(1, flush=True)\n"
            "time.sleep(600)"
        )
        return [sys.executable, "-c", program]


@pytest.mark.parametrize("all_of_them", [False, True])
def test_a_frozen_follower_ends_with_its_worker(all_of_them: bool) -> None:
    async def scene() -> None:
        group = GroupConfig(hosts=hosts_of(2), backend="ring", started=True, secret="s")
        workers = _Frozen(group, trust_remote_code=False, log_level="info")
        async with asyncio.timeout(PATIENCE):
            await workers.port(1)
            process, _ = workers._running[1]
            if all_of_them:
                await workers.end()
            else:
                workers.replace(1)
            assert process.stdout is not None
            assert await process.stdout.read() == b""  # nobody is left who could write
            await process.wait()

    asyncio.run(scene())


class _Follower:
    """A process that says what the test has it say."""

    def __init__(self) -> None:
        self.stdout, self.stderr = asyncio.StreamReader(64), asyncio.StreamReader(64)
        self.returncode: int | None = None
        self.pid = 0

    def kill(self) -> None:
        self.returncode = -9

    async def wait(self) -> int | None:
        return self.returncode


def test_a_follower_is_heard_after_a_line_that_is_too_long() -> None:
    async def scene() -> None:
        said = _Follower()
        child = Child(cast(Process, said), Recording(), lambda line: None)
        said.stdout.feed_data(b"x" * 200 + b"\n")
        await asyncio.sleep(0)
        said.stdout.feed_data(b'{"stage": "ready"}\n')
        said.stdout.feed_eof()
        said.stderr.feed_eof()
        async with asyncio.timeout(PATIENCE):
            await child.ended()
        assert child.beat().stage == "ready"
        await child.end()

    asyncio.run(scene())


def test_a_worker_that_cannot_tell_about_itself_is_free_for_the_next_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    about, left = module._about, [OSError("no such folder")]

    def once() -> Any:
        if left:
            raise left.pop()
        return about()

    monkeypatch.setattr(module, "_about", once)

    async def scene() -> None:
        listening: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        serving = asyncio.create_task(
            RankWorker(1, "secret").serve("127.0.0.1", 0, listening.set_result)
        )
        async with asyncio.timeout(PATIENCE):
            address = "127.0.0.1", await listening
            first = await connect(address, "secret", CONTROL, 1)
            assert await first.receive() is None
            again = await connect(address, "secret", CONTROL, 1)
            assert await again.receive() is not None
        for link in (first, again):
            link.close()
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)

    asyncio.run(scene())
