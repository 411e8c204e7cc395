"""Ranks that die, freeze or cannot be reached: noticed within five seconds, answered after that, five times
in a row."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import PYTHON, ROOT, Server
from split_models import LONG, answers, mixed, ranks, write

pytestmark = LONG

TIMES = 5
WIDE = {"num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 96}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write(tmp_path_factory.mktemp("models") / "wide", "llama", **WIDE)


@pytest.fixture(scope="module")
def split(folder: str) -> Iterator[Server]:
    running = Server(folder, "--ranks", "3").wait_ready()
    yield running
    running.stop()


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


LOSSES: dict[str, Callable[[Server], None]] = {
    "follower killed": lambda s: os.kill(ranks(s)[2]["pid"], signal.SIGKILL),
    "worker killed": lambda s: os.kill(_parent(ranks(s)[1]["pid"]), signal.SIGKILL),
    "follower stopped": lambda s: os.kill(ranks(s)[1]["pid"], signal.SIGSTOP),
    "worker stopped": lambda s: os.kill(_parent(ranks(s)[2]["pid"]), signal.SIGSTOP),
    "first rank killed": lambda s: os.kill(ranks(s)[0]["pid"], signal.SIGKILL),
    "first rank stopped": lambda s: os.kill(ranks(s)[0]["pid"], signal.SIGSTOP),
}


@pytest.mark.parametrize("loss", list(LOSSES))
def test_a_lost_rank_is_noticed_and_the_answers_go_on(split: Server, loss: str) -> None:
    bodies = [b | {"max_tokens": 120, "ignore_eos": True} for b in mixed()[:3]]
    expected = answers(split, bodies)
    for number in range(TIMES):
        noticed, back, answered = _lose(split, lambda: LOSSES[loss](split), bodies, expected)
        print(
            f"{loss} {number + 1}: noticed after {noticed:.1f} s, back after {back:.1f} s, "
            f"answered after {answered:.1f} s"
        )


def _lose(
    server: Server, lose: Callable[[], None], bodies: list[dict[str, Any]], expected: list[Any]
) -> tuple[float, float, float]:
    found: list[Any] = []
    asking = threading.Thread(target=lambda: found.extend(answers(server, bodies)))
    asking.start()
    while not any(r["made_tokens"] > 3 for r in server.status()["requests"]):
        time.sleep(0.01)
    before = [r["pid"] for r in ranks(server)]
    lose()
    begin = time.monotonic()
    noticed = _until(lambda: server.health()["status"] != "ready", 30)
    _until(lambda: server.health()["status"] == "ready", 60)
    back = time.monotonic() - begin
    asking.join(90)
    assert found == expected
    _until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in before), 30)
    return noticed, back, time.monotonic() - begin


def _until(what: Callable[[], bool], seconds: float) -> float:
    begin = time.monotonic()
    while not what():
        assert time.monotonic() - begin < seconds
        time.sleep(0.02)
    return time.monotonic() - begin


def _namespaces_work() -> bool:
    try:
        made = subprocess.run(["ip", "netns", "add", "millrace-try"], capture_output=True)
        subprocess.run(["ip", "netns", "del", "millrace-try"], capture_output=True)
    except OSError:
        return False
    return made.returncode == 0


class Network:
    """Three network namespaces on one bridge, an address each."""

    names = ("millrace-0", "millrace-1", "millrace-2")

    def __enter__(self) -> Network:
        self.__exit__()
        self._ip("netns", "add", self.names[0])
        first = ("-n", self.names[0])
        self._ip(*first, "link", "set", "lo", "up")
        self._ip(*first, "link", "add", "bridge", "type", "bridge")
        self._ip(*first, "addr", "add", "10.77.0.1/24", "dev", "bridge")
        self._ip(*first, "link", "set", "bridge", "up")
        for rank, name in enumerate(self.names[1:], 1):
            self._ip("netns", "add", name)
            self._ip("-n", name, "link", "set", "lo", "up")
            self._ip(*first, "link", "add", f"to{rank}", "type", "veth", "peer", "name", "eth")
            self._ip(*first, "link", "set", "eth", "netns", name)
            self._ip(*first, "link", "set", f"to{rank}", "master", "bridge", "up")
            self._ip("-n", name, "addr", "add", f"10.77.0.{rank + 1}/24", "dev", "eth")
            self._ip("-n", name, "link", "set", "eth", "up")
        return self

    def __exit__(self, *_: object) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)

    def cut(self, rank: int) -> None:
        self._ip("-n", self.names[0], "link", "set", f"to{rank}", "down")

    def mend(self, rank: int) -> None:
        self._ip("-n", self.names[0], "link", "set", f"to{rank}", "up")

    def _ip(self, *words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.mark.skipif(not _namespaces_work(), reason="network namespaces need root")
def test_a_cut_link_is_noticed_and_told_and_mended(folder: str, tmp_path: Path) -> None:
    hosts = tmp_path / "hosts.json"
    hosts.write_text('["10.77.0.1:5000", "10.77.0.2:5000", "10.77.0.3:5000"]')
    with Network() as network:
        workers = [
            subprocess.Popen(
                [
                    *(
                        "ip",
                        "netns",
                        "exec",
                        network.names[rank],
                        PYTHON,
                        "-m",
                        "millrace",
                        "worker",
                    ),
                    *("--rank", str(rank), "--hostfile", str(hosts)),
                ],
                cwd=ROOT,
                stderr=subprocess.DEVNULL,
            )
            for rank in (1, 2)
        ]
        server = _Inside(network.names[0], folder, hosts)
        try:
            for number in range(TIMES):
                body = mixed()[0] | {"max_tokens": 60, "ignore_eos": True}
                told = server.begin(body)
                network.cut(2)
                begin = time.monotonic()
                noticed = _until(lambda: server.status() != 200, 15)
                if number == 0:
                    # It stays away: whoever waits hears of it, and is not left in silence.
                    told.join(60)
                    assert server.last is not None and server.last[0] == 503, server.last
                    assert "rank 2" in server.last[1]
                    heard = time.monotonic() - begin
                    print(f"cut for long: noticed after {noticed:.1f} s, told after {heard:.1f} s")
                    network.mend(2)
                    _until(lambda: server.status() == 200, 60)
                    continue
                network.mend(2)
                ready = _until(lambda: server.status() == 200, 60)
                told.join(60)
                assert server.last is not None and server.last[0] == 200, server.last
                back = time.monotonic() - begin
                print(
                    f"cut {number + 1}: noticed after {noticed:.1f} s, back {ready:.1f} s after it was "
                    f"mended, answered after {back:.1f} s"
                )
        finally:
            server.stop()
            for worker in workers:
                worker.terminate()
                worker.wait(20)


class _Inside:
    """A server in a namespace, asked by `curl` in the same one."""

    def __init__(self, name: str, folder: str, hosts: Path) -> None:
        self._in = ("ip", "netns", "exec", name)
        self.last: tuple[int, str] | None = None
        command = [PYTHON, "-m", "millrace", "serve", folder, "--only", "--port", "8123"]
        self._process = subprocess.Popen(
            [*self._in, *command, "--hostfile", str(hosts)],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        _until(lambda: self.status() == 200, 120)

    def status(self) -> int:
        return self._curl("/health")[0]

    def begin(self, body: dict[str, Any]) -> threading.Thread:
        import json

        self.last = None

        def ask() -> None:
            self.last = self._curl("/v1/completions", json.dumps(body))

        thread = threading.Thread(target=ask)
        thread.start()
        while '"phase":"decode"' not in self._curl("/v1/status")[1].replace(" ", ""):
            assert self.last is None, self.last
        return thread

    def _curl(self, path: str, body: str | None = None) -> tuple[int, str]:
        more = ["-H", "content-type: application/json", "-d", body] if body is not None else []
        command = ["curl", "-s", "-m", "90", "-w", "\n%{http_code}", *more]
        done = subprocess.run(
            [*self._in, *command, f"http://127.0.0.1:8123{path}"], capture_output=True, text=True
        )
        text, _, code = done.stdout.rpartition("\n")
        return int(code or 0), text

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(60)
