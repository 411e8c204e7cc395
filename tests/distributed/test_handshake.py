"""Who connects to a rank proves itself first, and strangers keep no rank out."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import PATIENCE

from millrace.distributed import channel as channels
from millrace.distributed import handshake
from millrace.distributed.greetings import Greetings
from millrace.distributed.handshake import LENGTH, Challenge, Hello, Proof, Refused, Welcome
from millrace.distributed.hostfile import read_hostfile
from millrace.distributed.messages import CONTROL, VISIT
from millrace.errors import SetupError
from millrace.serving.ranks import link as links
from millrace.serving.ranks.worker import RankWorker

SECRET = "a secret of this test"
STRANGERS = 40
Address = tuple[str, int]


@contextlib.contextmanager
def _worker() -> Iterator[Address]:
    """A rank's worker, in an event loop of its own."""
    loop = asyncio.new_event_loop()
    listening: asyncio.Future[int] = loop.create_future()
    ready = threading.Event()
    listening.add_done_callback(lambda _: ready.set())
    serving = loop.create_task(RankWorker(1, SECRET).serve("127.0.0.1", 0, listening.set_result))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    assert ready.wait(PATIENCE)
    yield "127.0.0.1", listening.result()
    loop.call_soon_threadsafe(serving.cancel)
    ended = asyncio.run_coroutine_threadsafe(asyncio.wait({serving}), loop)
    ended.result(PATIENCE)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(PATIENCE)
    loop.close()


@contextlib.contextmanager
def _door() -> Iterator[Address]:
    """The first rank's listener, which welcomes all who have proved themselves."""
    door = channels.Door(("127.0.0.1", 0), SECRET)
    address = door.address
    over = threading.Event()

    def welcome() -> None:
        while not over.is_set():
            with contextlib.suppress(TimeoutError, OSError):
                channels.welcome(door.next(0.05)[1], None)

    thread = threading.Thread(target=welcome)
    thread.start()
    yield address
    over.set()
    thread.join(PATIENCE)
    door.close()


Listener = Callable[[], contextlib.AbstractContextManager[Address]]
LISTENERS = [_worker, _door]


def _message(data: bytes) -> bytes:
    return LENGTH.pack(len(data)) + data


def _all_sent(stranger: socket.socket) -> bytes:
    """What a listener sends until it hangs up."""
    stranger.settimeout(PATIENCE)
    heard = b""
    with contextlib.suppress(ConnectionResetError):
        while more := stranger.recv(65536):
            heard += more
    return heard


@pytest.mark.parametrize("listener", LISTENERS)
def test_a_stranger_gets_nothing_that_depends_on_the_secret(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (channels, links):
        monkeypatch.setattr(module, "GREETING_SECONDS", 1.0)
    said = handshake.hello(CONTROL, 1)
    with listener() as address:
        for after in (b"", _message(handshake.packed(Proof(bytes(32))))):
            with socket.create_connection(address, timeout=PATIENCE) as stranger:
                stranger.sendall(_message(handshake.packed(said)) + after)
                heard = _all_sent(stranger)
            (length,) = LENGTH.unpack(heard[: LENGTH.size])
            assert len(heard) == LENGTH.size + length, (
                "one message, and no more after a false proof"
            )
            answer = handshake.decode(heard[LENGTH.size :])
            assert isinstance(answer, Challenge)
            for side in (b"listens", b"connects"):
                assert handshake._proof(SECRET, side, said, answer.number) not in heard


@pytest.mark.parametrize("listener", LISTENERS)
def test_silent_strangers_neither_reset_nor_delay_a_rank(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of their deadlines passes during the test."""
    for module in (channels, links):
        monkeypatch.setattr(module, "GREETING_SECONDS", 10 * PATIENCE)
    with listener() as address, contextlib.ExitStack() as strangers:
        for _ in range(3):
            for _ in range(STRANGERS):
                strangers.enter_context(socket.create_connection(address, timeout=PATIENCE))
            channels.connect(address, SECRET, VISIT, 1, PATIENCE).close()


def test_a_listener_without_the_secret_is_refused() -> None:
    said = handshake.hello(CONTROL, 1)
    theirs = Challenge(bytes(16))
    assert handshake.prove(SECRET, said, theirs)[0] is theirs
    for welcome in (Welcome(), Welcome(proof=bytes(32)), Proof(bytes(32)), Welcome("no", b"")):
        with pytest.raises(Refused):
            handshake.confirm(SECRET, said, theirs, welcome)
    right = handshake._proof(SECRET, b"listens", said, theirs.number)
    handshake.confirm(SECRET, said, theirs, Welcome(proof=right))
    reflected = handshake._proof(SECRET, b"connects", said, theirs.number)
    with pytest.raises(Refused, match="secret"):
        handshake.confirm(SECRET, said, theirs, Welcome(proof=reflected))


def test_messages_out_of_order_are_refused() -> None:
    for first in (Proof(b""), Welcome(), Challenge(bytes(16)), Hello("control", 1, b"short")):
        with pytest.raises(Refused):
            handshake.challenge(first)
    said, mine = handshake.challenge(handshake.hello(CONTROL, 1))
    for second in (said, Welcome(), Challenge(bytes(16)), Proof(b""), Proof(bytes(32))):
        with pytest.raises(Refused):
            handshake.check(SECRET, said, mine, second)
    for answer in (said, Proof(b""), Welcome("no"), Challenge(b"short"), Challenge(bytes(16), "0")):
        with pytest.raises(Refused):
            handshake.prove(SECRET, said, answer)


def test_the_oldest_silent_connection_of_the_busiest_address_is_dropped() -> None:
    greetings, closed = Greetings(4), []

    def enter(name: str, peer: str) -> None:
        pending = greetings.enter(peer, lambda: closed.append(name))
        pending.spoke = "speaks" in name

    for name in ("a speaks", "b", "c"):
        enter(name, "10.0.0.66")
    enter("rank", "10.0.0.2")
    enter("d", "10.0.0.66")
    enter("e", "10.0.0.66")
    enter("f speaks", "10.0.0.66")
    enter("other", "10.0.0.3")
    assert closed == ["b", "c", "d", "e"]
    left = greetings.enter("10.0.0.4", lambda: None)
    assert closed[4:] == ["a speaks"]
    greetings.leave(left)
    greetings.leave(left)
    enter("g", "10.0.0.5")
    assert len(closed) == 5


@pytest.mark.parametrize("secret", ["x", "hunter2", "fifteen bytes..", "é" * 7])
def test_a_short_secret_is_refused_at_the_start(tmp_path: Path, secret: str) -> None:
    file = tmp_path / "hosts.json"
    file.write_text('["127.0.0.1:5000", "127.0.0.1:5001"]')
    with pytest.raises(SetupError, match="at least 16.*openssl rand"):
        read_hostfile(str(file), secret=secret)
    assert read_hostfile(str(file), secret="é" * 8).secret == "é" * 8
    assert read_hostfile(str(file)).secret


def test_a_worker_with_a_short_secret_does_not_start(tmp_path: Path) -> None:
    file = tmp_path / "hosts.json"
    file.write_text('["127.0.0.1:5000", "127.0.0.1:5001"]')
    done = subprocess.run(
        [sys.executable, "-m", "millrace", "worker", "--rank", "1", "--hostfile", str(file)],
        env=os.environ | {"MILLRACE_RANKS_SECRET": "hunter2"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode != 0
    assert "openssl rand" in done.stderr and "hunter2" not in done.stderr
