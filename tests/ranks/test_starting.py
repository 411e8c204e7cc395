"""The ways in which ranks are started: over ssh, by mlx.launch, and by hand."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path

from conftest import PYTHON, ROOT, Server, ended, free_port, until
from split_models import LONG, answers, mixed, ranks, write

from millrace.distributed.messages import SILENT_SECONDS

pytestmark = LONG


def _port() -> int:
    """One whose neighbour for orders exists as well."""
    while (port := free_port()) > 60_000:
        continue
    return port


def test_workers_are_started_over_ssh_and_end_with_the_server(tmp_path: Path) -> None:
    """A script stands for ssh: it runs here what it should have run there."""
    folder = write(tmp_path / "qwen3", "qwen3")
    asked = tmp_path / "asked"
    ssh = tmp_path / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text(f'#!/bin/sh\necho "$4" >> {asked}\nexec sh -c "$5"\n')
    ssh.chmod(0o755)
    hosts = tmp_path / "hosts.json"
    hosts.write_text(
        json.dumps(
            [
                {"ssh": "localhost", "ips": [f"127.0.0.1:{_port()}"]},
                {"ssh": "me@other.example", "ips": [f"127.0.0.1:{_port()}"]},
            ]
        )
    )
    path = f"{ssh.parent}:{os.environ['PATH']}"
    server = Server(folder, "--hostfile", str(hosts), env={"PATH": path}).wait_ready()
    assert asked.read_text().split() == ["me@other.example"]
    assert answers(server, mixed()[:2])
    pid = ranks(server)[1]["pid"]
    assert server.stop() == 0
    assert until(lambda: not Path(f"/proc/{pid}").exists())


def test_what_mlx_launch_sets_makes_ranks_of_serve(tmp_path: Path) -> None:
    folder = write(tmp_path / "qwen3", "qwen3")
    hosts = tmp_path / "hosts.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{_port()}"], [f"127.0.0.1:{_port()}"]]))
    environment = {"MLX_HOSTFILE": str(hosts)}
    worker = subprocess.Popen(
        [PYTHON, "-m", "millrace", "serve", folder],
        cwd=ROOT,
        env=os.environ | environment | {"MLX_RANK": "1"},
        stderr=subprocess.DEVNULL,
    )
    server = Server(folder, env=environment | {"MLX_RANK": "0"}).wait_ready()
    try:
        assert answers(server, mixed()[:1])
        # Workers tell how they are twice a second.
        deadline = time.monotonic() + 30
        while [r["state"] for r in ranks(server)] != ["ready", "ready"]:
            assert time.monotonic() < deadline, ranks(server)
            time.sleep(0.1)
        looked = subprocess.run(
            [
                PYTHON,
                "-m",
                "millrace",
                "doctor",
                "--hostfile",
                str(hosts),
                "--model",
                folder,
                "--json",
            ],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
        )
        report = json.loads(looked.stdout)
        assert report["problems"] == [] and len(report["ways"]) == 1
        assert report["ways"][0]["megabytes_per_second"] > 0
        # To look disturbs nobody.
        assert server.status()["restarts"] == 0, server.log()
    finally:
        server.stop()
        assert worker.poll() is None, "workers wait for the next server"
        assert ended(worker, 30) == 0


def test_a_worker_that_comes_late_is_waited_for_by_the_server_and_the_other(tmp_path: Path) -> None:
    folder = write(tmp_path / "qwen3", "qwen3", num_hidden_layers=3)
    hosts = tmp_path / "hosts.json"
    hosts.write_text(json.dumps([f"127.0.0.1:{_port()}" for _ in range(3)]))
    server = Server(folder, "--hostfile", str(hosts))
    workers = [_worker(hosts, 1)]
    try:
        deadline = time.monotonic() + 60
        while "rank 2" not in server.log() and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(SILENT_SECONDS + 1)
        workers.append(_worker(hosts, 2))
        server.wait_ready()
        assert answers(server, mixed()[:1])
        assert server.status()["restarts"] == 0, server.log()
    finally:
        server.stop()
        assert [ended(worker, 30) for worker in workers] == [0, 0]


def _worker(hosts: Path, rank: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [PYTHON, "-m", "millrace", "worker", "--rank", str(rank), "--hostfile", str(hosts)],
        cwd=ROOT,
        stderr=subprocess.DEVNULL,
    )


def test_doctor_names_what_is_wrong_with_ranks(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts.json"
    hosts.write_text(json.dumps([f"127.0.0.1:{_port()}", f"127.0.0.1:{_port()}"]))
    looked = subprocess.run(
        [PYTHON, "-m", "millrace", "doctor", "--hostfile", str(hosts), "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert looked.returncode == 1
    assert "rank 1" in json.loads(looked.stdout)["problems"][0]
