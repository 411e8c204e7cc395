"""The ways in which ranks are started: over ssh, by mlx.launch, and by hand."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from conftest import PYTHON, ROOT, Server, ended, free_port
from split_models import LONG, answers, mixed, ranks, write

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
    assert not Path(f"/proc/{pid}").exists()


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
        assert [r["state"] for r in ranks(server)] == ["ready", "ready"]
        assert answers(server, mixed()[:1])
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
        assert server.status()["restarts"] == 0
    finally:
        server.stop()
        assert worker.poll() is None, "workers wait for the next server"
        assert ended(worker, 30) == 0


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
