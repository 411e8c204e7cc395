"""Records of running servers: written, found, kept up to date, and removed when nobody holds them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest

from millrace import servers
from millrace.servers import Registration, ServerMemory, ServerRecord

HOLDER = """
import sys, time
from millrace.servers import Registration, ServerRecord, this_machine
r = Registration(ServerRecord(host="127.0.0.1", port=int(sys.argv[1]), pid=1, machine=this_machine()))
r.open()
print("open", flush=True)
time.sleep(300)
"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MILLRACE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def opened(port: int, **fields: object) -> Registration:
    record = ServerRecord(host="127.0.0.1", port=port, pid=os.getpid())
    changes = {"machine": servers.this_machine(), "started": float(port)} | fields
    registration = Registration(msgspec.structs.replace(record, **changes))
    registration.open()
    return registration


def files(home: Path) -> list[str]:
    return sorted(p.name.partition("-")[0] for p in (home / "servers").iterdir())


def test_servers_find_each_other_and_leave(home: Path) -> None:
    assert servers.running() == []
    first, second = opened(8001, name="one"), opened(8002)
    assert [r.port for r in servers.running()] == [8001, 8002]
    assert [r.port for r in first.others()] == [8002]
    second.update(ServerMemory(weights=5, held=7))
    assert first.others()[0].memory == ServerMemory(weights=5, held=7)
    second.update(ServerMemory())  # a shorter text leaves nothing of the longer one behind
    assert first.others()[0].memory == ServerMemory()
    first.close()
    assert [r.port for r in servers.running()] == [8002] and files(home) == ["8002"]
    second.close()
    second.close()
    assert servers.running() == [] and files(home) == []


def test_a_killed_server_is_swept(home: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", HOLDER, "8003"], stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdout.readline() == b"open\n"
    assert [r.port for r in servers.running()] == [8003]
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    assert files(home) == ["8003"]
    assert servers.running() == [] and files(home) == []


def test_a_child_process_does_not_keep_the_record_alive(home: Path) -> None:
    registration = opened(8004)
    child = subprocess.Popen(["sleep", "60"], close_fds=False)
    try:
        assert registration._descriptor is not None
        os.close(registration._descriptor)  # as when the process ends
        assert servers.running() == []
    finally:
        child.kill()
        child.wait()


def test_servers_of_other_machines_that_share_the_folder_are_not_ours(home: Path) -> None:
    elsewhere = opened(8005, machine="another")
    assert servers.running() == [] and files(home) == ["8005"]
    elsewhere.close()


def test_what_is_no_record_is_passed_over(home: Path) -> None:
    registration = opened(8006)
    (home / "servers" / "notes.txt").write_text("mine")
    (home / "servers" / "1-bad.json").write_text("{")
    assert [r.port for r in servers.running()] == [8006]
    assert files(home) == ["8006", "notes.txt"]
    registration.close()


def test_readers_at_the_start_of_a_server_do_not_remove_its_record() -> None:
    stop = threading.Event()

    def look() -> None:
        while not stop.is_set():
            servers.running()

    readers = [threading.Thread(target=look) for _ in range(3)]
    for reader in readers:
        reader.start()
    try:
        for port in range(9000, 9050):
            registration = opened(port)
            assert port in [r.port for r in servers.running()]
            registration.close()
    finally:
        stop.set()
        for reader in readers:
            reader.join()


def test_a_record_that_was_never_finished_is_removed(home: Path) -> None:
    opened(8001)
    old, young = home / "servers" / "8002-a.new", home / "servers" / "8003-b.new"
    for path in (old, young):
        path.write_text("{}")
    os.utime(old, (0, 0))
    assert [r.port for r in servers.running()] == [8001]
    assert not old.exists() and young.exists()


def test_a_folder_that_cannot_be_written_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MILLRACE_HOME", str(tmp_path / "file"))
    registration = opened(8007)
    registration.update(ServerMemory(held=1))
    assert servers.running() == [] and registration.others() == []
    registration.close()


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:80"),
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("::", "http://[::1]:80"),
        ("::1", "http://[::1]:80"),
        ("10.1.2.3", "http://10.1.2.3:80"),
    ],
)
def test_the_address_can_be_connected_to(host: str, url: str) -> None:
    assert ServerRecord(host=host, port=80, pid=1).url == url
