"""The cache on disk over restarts, kills and damage: what is there is used, and never wrongly."""

from __future__ import annotations

import os
import random
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from api import tiny_folder, tiny_shapes
from api.cache_help import cached, complete, report, text, wait_written
from conftest import Server, held

PROMPT = text(600, 1)
Start = Callable[..., Server]


@dataclass
class Left:
    """A folder that a server has left behind, and what it had answered."""

    model: Path
    disk: Path
    answer: dict[str, Any]


def _options(model: Path, disk: Path) -> list[str]:
    return [str(model), "--name", "tiny", "--cache-disk", "64M", "--cache-dir", str(disk)]


@pytest.fixture(scope="module")
def left(default_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Left:
    base = tmp_path_factory.mktemp("left")
    model = tiny_folder.make(base / "model", default_model)
    server = Server(*_options(model, base / "disk")).wait_ready()
    answer = complete(server, PROMPT)
    wait_written(server)
    server.stop()
    return Left(model, base / "disk", answer)


@pytest.fixture
def copy(left: Left, tmp_path: Path) -> Path:
    return Path(shutil.copytree(left.disk, tmp_path / "disk"))


def _largest(folder: Path) -> Path:
    return max(folder.glob("*/*.safetensors"), key=lambda f: f.stat().st_size)


def _texts(answer: dict[str, Any]) -> list[str]:
    return [c["text"] for c in answer["choices"]]


def test_a_restart_by_sigterm_and_a_killed_engine(start: Start, left: Left, tmp_path: Path) -> None:
    options = _options(left.model, tmp_path / "disk")
    server = start(*options).wait_ready()
    first = complete(server, PROMPT)
    length = first["usage"]["prompt_tokens"]
    assert server.stop() == 0  # at once: what was only in memory is written on the way out
    server = start(*options).wait_ready()
    before = report(server)
    assert before["memory"]["tokens"] == 0 and before["disk"]["tokens"] >= length - 1
    again = complete(server, PROMPT)
    assert cached(again) == length - 1
    assert _texts(again) == _texts(first)
    assert report(server)["hits"]["disk"] == 1
    assert report(server)["disk"]["tokens_saved"] == length - 1

    server.kill_engine()
    server.restarted()
    again = complete(server, PROMPT)
    assert cached(again) == length - 1 and _texts(again) == _texts(first)
    assert report(server)["hits"]["disk"] == 1
    # The second time it is in memory.
    assert cached(complete(server, PROMPT)) == length - 1
    assert report(server)["hits"] == {
        "exact": 1,
        "prefix": 0,
        "checkpoint": 0,
        "disk": 1,
        "none": 0,
    }


def test_a_hybrid_after_a_restart(start: Start, default_model: Path, tmp_path: Path) -> None:
    model = tiny_shapes.make(tmp_path / "model", default_model, "qwen3_next")
    options = _options(model, tmp_path / "disk")
    server = start(*options).wait_ready()
    first = complete(server, PROMPT)
    assert server.stop() == 0
    server = start(*options).wait_ready()
    again = complete(server, PROMPT)
    assert cached(again) == first["usage"]["prompt_tokens"] - 1
    assert _texts(again) == _texts(first)


@pytest.mark.parametrize("fault", ["truncated", "flipped bit"])
def test_a_damaged_file(start: Start, left: Left, copy: Path, fault: str) -> None:
    file = _largest(copy)
    data = bytearray(file.read_bytes())
    if fault == "truncated":
        file.write_bytes(data[: len(data) // 2])
    else:
        data[len(data) * 3 // 4] ^= 1
        file.write_bytes(data)
    server = start(*_options(left.model, copy)).wait_ready()
    for _ in range(2):
        assert _texts(complete(server, PROMPT)) == _texts(left.answer)
    reported = report(server)
    assert reported["hits"]["disk"] == 0 and reported["disk"]["error"]
    assert cached(complete(server, PROMPT)) == left.answer["usage"]["prompt_tokens"] - 1
    assert _warnings(server) == 1


@pytest.mark.parametrize("seed", range(3))
def test_a_damaged_index(start: Start, left: Left, copy: Path, seed: int) -> None:
    """Sixty writes of four bytes at random, as a failing disk makes them."""
    (index,) = copy.glob("*/index.sqlite")
    source = random.Random(seed)
    data = bytearray(index.read_bytes())
    for _ in range(60):
        at = source.randrange(len(data) - 4)
        data[at : at + 4] = source.randbytes(4)
    index.write_bytes(data)
    server = start(*_options(left.model, copy)).wait_ready()
    assert server.status()["restarts"] == 0
    assert _texts(complete(server, PROMPT)) == _texts(left.answer)
    reported = report(server)
    assert reported["hits"]["disk"] == 0 and "set aside" in reported["disk"]["error"]
    assert _warnings(server) == 1
    assert index.with_name("index.sqlite-damaged").read_bytes() == data
    wait_written(server)


def _warnings(server: Server) -> int:
    """Of a machine that stalls, a server may warn as well."""
    told = [line for line in server.log().splitlines() if " warning " in line]
    return sum("has not been heard of" not in line for line in told)


def test_a_changed_model_under_the_same_name(start: Start, left: Left, copy: Path) -> None:
    weights = left.model / "model.safetensors"
    before, stamp = weights.read_bytes(), weights.stat()
    try:
        changed = bytearray(before)
        changed[-64:] = bytes(64)
        weights.write_bytes(changed)
        server = start(*_options(left.model, copy)).wait_ready()
        assert report(server)["disk"]["tokens"] == 0
        assert cached(complete(server, PROMPT)) == 0
        assert server.stop() == 0
    finally:
        weights.write_bytes(before)
        os.utime(weights, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    # The old model's state is still its own.
    server = start(*_options(left.model, copy)).wait_ready()
    assert cached(complete(server, PROMPT)) == left.answer["usage"]["prompt_tokens"] - 1


def test_two_servers_on_one_folder(start: Start, left: Left, copy: Path) -> None:
    first, second = (start(*_options(left.model, copy)).wait_ready() for _ in range(2))
    for server in (first, second):
        assert _texts(complete(server, PROMPT)) == _texts(left.answer)
    length = left.answer["usage"]["prompt_tokens"]
    assert report(first)["disk"]["tokens_saved"] == length - 1
    reported = report(second)["disk"]
    assert reported["tokens_saved"] == 0 and "belongs to the server at port" in reported["error"]
    assert (_warnings(first), _warnings(second)) == (0, 1)
    # It has a cache in memory all the same.
    assert cached(complete(second, PROMPT)) == length - 1


@pytest.mark.parametrize("how", ["under a file", "read-only"])
def test_a_folder_that_cannot_be_written(
    start: Start, left: Left, copy: Path, tmp_path: Path, how: str
) -> None:
    if how == "under a file":
        (tmp_path / "file").write_text("")
        folder = tmp_path / "file" / "disk"
    else:
        if os.geteuid() == 0:
            pytest.skip("nothing is read-only to root")
        folder = copy
        for path in (*copy.glob("*"), copy):
            path.chmod(0o555)
    server = start(*_options(left.model, folder)).wait_ready()
    assert _texts(complete(server, PROMPT)) == _texts(left.answer)
    assert report(server)["disk"]["error"]
    assert _warnings(server) == 1
    assert cached(complete(server, PROMPT)) == left.answer["usage"]["prompt_tokens"] - 1
    for path in (copy, *copy.glob("*")):
        path.chmod(0o755)


def test_a_killed_server_leaves_a_usable_folder(start: Start, left: Left, copy: Path) -> None:
    server = start(*_options(left.model, copy)).wait_ready()
    complete(server, text(300, 2))
    engine = server.engine
    with held(engine):  # it does not live to see that there is no front any more
        server.process.kill()
        server.process.wait()
        os.kill(engine, signal.SIGKILL)
    server = start(*_options(left.model, copy)).wait_ready()
    again = complete(server, PROMPT)
    assert cached(again) == left.answer["usage"]["prompt_tokens"] - 1
    assert _texts(again) == _texts(left.answer) and _warnings(server) == 0
