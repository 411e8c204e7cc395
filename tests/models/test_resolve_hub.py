"""Fetching from a hub, played by a small server here: files, progress, refusals, then no network."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import fake_hub
import pytest

FILES = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "model.safetensors": (2).to_bytes(8, "little") + b"{}" + bytes(3_000_000),
    "model.py": b"raise SystemExit('never fetched')",
    "pytorch_model.bin": bytes(10),
}
ASK = """
import sys
from millrace.errors import ModelError
from millrace.models.resolve import resolve
def say(stage, done, total):
    print("progress", stage, done, total)
try:
    found = resolve(sys.argv[1], progress=say)
    print("found", sorted(p.name for p in found.path.iterdir()))
except ModelError as error:
    print("error", error.message)
"""


@pytest.fixture
def hub() -> Iterator[tuple[str, list[str]]]:
    with fake_hub.serving({"org/name": FILES}) as running:
        yield running.url, running.asked


def ask(name: str, endpoint: str, tmp_path: Path) -> list[str]:
    places = {"HF_ENDPOINT": endpoint, "HF_HUB_CACHE": str(tmp_path / "hub")}
    places |= {"MILLRACE_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", ASK, name],
        env=os.environ | places | {"no_proxy": "127.0.0.1", "NO_PROXY": "127.0.0.1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0 and done.stderr == "", done.stderr
    return done.stdout.splitlines()


def test_what_is_needed_is_fetched_once(hub: tuple[str, list[str]], tmp_path: Path) -> None:
    endpoint, asked = hub
    *progress, found = ask("org/name", endpoint, tmp_path)
    assert found == "found ['config.json', 'model.safetensors', 'tokenizer.json']"
    assert progress[0] == "progress Fetching org/name 0 None"
    wanted = sum(len(FILES[n]) for n in ("config.json", "model.safetensors", "tokenizer.json"))
    assert progress[-1] == f"progress Fetching org/name {wanted} {wanted}"
    asked.clear()
    assert ask("org/name", endpoint, tmp_path) == [found]
    assert asked == []


def test_refusals_say_what_to_do(hub: tuple[str, list[str]], tmp_path: Path) -> None:
    endpoint, _ = hub
    assert "no public model 'org/none'" in ask("org/none", endpoint, tmp_path)[-1]
    assert "accept it" in ask("org/gated", endpoint, tmp_path)[-1]


def test_no_network_says_what_to_do(tmp_path: Path) -> None:
    (*_, error) = ask("org/name", "http://127.0.0.1:9", tmp_path)
    assert error.startswith("error The model 'org/name' is not on this machine, or not whole")
