"""A store without room, over HTTP: refused before the work, delivered if it fills up, deleted from."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from api import tiny_folder
from api.responses_wire import check_order, events
from conftest import Server

ASK: Any = {"input": "hi", "max_output_tokens": 3, "ignore_eos": True, "temperature": 0}
BIG = ASK | {"metadata": {f"k{n}": "v" * 500 for n in range(16)}}
PAGES = 160
"""What the file of `cramped` may grow to."""

_LIMITED = f"""
import sqlite3
_connect = sqlite3.connect
def connect(path, *args, **kwargs):
    made = _connect(path, *args, **kwargs)
    if str(path).endswith("cramped.sqlite"):
        made.execute("PRAGMA max_page_count = {PAGES}").fetchall()
    return made
sqlite3.connect = connect
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, default_model: Path) -> Path:
    return tiny_folder.make(tmp_path_factory.mktemp("space") / "tiny", default_model)


@pytest.fixture(scope="module")
def cramped(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose store fails as on a full disk, although the disk has room."""
    folder = tmp_path_factory.mktemp("cramped")
    (folder / "sitecustomize.py").write_text(_LIMITED)
    path = f"{folder}:{Path(__file__).parents[2]}"
    server = Server(
        str(model), "--store", str(folder / "cramped.sqlite"), env={"PYTHONPATH": path}
    ).wait_ready()
    yield server
    server.stop()


def _fill(post: Callable[[Any], httpx.Response]) -> list[str]:
    """Store responses until one is not stored; returns the ids of those that are."""
    kept = []
    for _ in range(500):
        answer = post(BIG)
        if answer.status_code != 200 or not answer.json()["store"]:
            return kept
        kept.append(answer.json()["id"])
    raise AssertionError("the store was never full")


def _error(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


def test_answers_are_whole_when_the_store_fills_up(cramped: Server) -> None:
    def post(body: Any) -> httpx.Response:
        return cramped.post("/v1/responses", body)

    kept = _fill(post)
    answer = post(BIG)
    response = answer.json()
    assert answer.status_code == 200 and response["status"] == "incomplete" and response["output"]
    assert response["store"] is False
    assert response["store_error"]["code"] == "insufficient_storage"
    assert "database or disk is full" in response["store_error"]["message"]
    assert answer.headers["x-millrace-ignored"] == "store"
    assert cramped.http.get(f"/v1/responses/{response['id']}").status_code == 404

    with cramped.http.stream("POST", "/v1/responses", json=BIG | {"stream": True}) as streamed:
        last = check_order(events(streamed))
    assert last["status"] == "incomplete" and last["store"] is False
    assert cramped.http.get(f"/v1/responses/{last['id']}").status_code == 404
    assert "was not kept: The response store failed: database or disk is full" in cramped.log()
    assert "cannot rollback" not in cramped.log()

    kept += _fill(lambda _: post(ASK))
    assert _error(post(BIG | {"background": True})) == (507, "insufficient_storage")
    talk = cramped.post("/v1/conversations", {"items": [{"role": "user", "content": "x" * 90_000}]})
    assert _error(talk) == (507, "insufficient_storage")
    unstored = post(BIG | {"store": False})
    assert unstored.status_code == 200 and unstored.json()["store"] is False
    assert "store_error" not in unstored.json()

    for id in kept:
        assert cramped.http.delete(f"/v1/responses/{id}").status_code == 200
    assert post(BIG).json()["store"] is True


def test_a_background_answer_that_cannot_be_stored_is_held_in_memory(cramped: Server) -> None:
    kept = _fill(lambda body: cramped.post("/v1/responses", body))
    for id in kept[:2]:
        cramped.http.delete(f"/v1/responses/{id}")
    # Its input fits, its answer with all events does not.
    long = ASK | {"background": True, "stream": True, "max_output_tokens": 400, "top_logprobs": 20}
    with cramped.http.stream("POST", "/v1/responses", json=long) as streamed:
        last = check_order(events(streamed))
    assert last["status"] == "incomplete" and last["store"] is False
    place = f"/v1/responses/{last['id']}"
    held = cramped.http.get(place).json()
    assert held == last and held["store_error"]["code"] == "insufficient_storage"
    with cramped.http.stream("GET", place, params={"stream": "true"}) as again:
        assert check_order(events(again)) == last
    assert cramped.http.delete(place).status_code == 200
    assert cramped.http.get(place).status_code == cramped.http.delete(place).status_code == 404


def test_a_key_that_used_its_share_is_refused_before_the_work(
    start: Callable[..., Server], model: Path
) -> None:
    keys = ("--api-key", "ann", "--api-key", "bob")
    server = start(str(model), *keys, "--store-limit", "200K").wait_ready()

    def ask(key: str, method: str, path: str, body: Any = None) -> httpx.Response:
        bearer = {"authorization": f"Bearer {key}"}
        return server.http.request(method, path, json=body, headers=bearer)

    kept = _fill(lambda body: ask("ann", "POST", "/v1/responses", body))
    before = server.log().count("request ended")
    for more in ({}, {"stream": True}, {"background": True}):
        refused = ask("ann", "POST", "/v1/responses", BIG | more)
        assert _error(refused) == (507, "insufficient_storage")
        assert "--store-limit" in refused.json()["error"]["message"]
    assert server.log().count("request ended") == before, "nothing was generated"
    long = {"items": [{"role": "user", "content": "x" * 30_000}]}
    assert _error(ask("ann", "POST", "/v1/conversations", long)) == (507, "insufficient_storage")
    assert ask("ann", "POST", "/v1/responses", BIG | {"store": False}).status_code == 200
    assert ask("ann", "GET", f"/v1/responses/{kept[0]}").status_code == 200, "the oldest is kept"
    assert ask("bob", "POST", "/v1/responses", BIG).json()["store"] is True
    for id in kept[:3]:
        assert ask("ann", "DELETE", f"/v1/responses/{id}").status_code == 200
    assert ask("ann", "POST", "/v1/responses", BIG).json()["store"] is True


_MOUNT = 'mount -t tmpfs -o size=2m tmpfs "$0" && exec "$@"'


def _may_mount(folder: Path) -> bool:
    if shutil.which("unshare") is None:
        return False
    command = ["unshare", "-rm", "sh", "-c", _MOUNT, str(folder), "true"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def test_what_is_on_a_full_disk_can_be_deleted(
    start: Callable[..., Server], model: Path, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if not _may_mount(disk):
        pytest.skip("a small disk cannot be mounted here")
    server = start(
        str(model),
        *("--store", str(disk / "store.sqlite"), "--store-limit", "1G"),
        within=("unshare", "-rm", "sh", "-c", _MOUNT, str(disk)),
    ).wait_ready()
    kept = _fill(lambda body: server.post("/v1/responses", body))
    refused = server.post("/v1/responses", BIG)
    assert _error(refused) == (507, "insufficient_storage") and "free" in refused.text
    # Something else takes the rest of the disk.
    inside = Path(f"/proc/{server.process.pid}/root{disk}")
    with (inside / "other").open("wb", buffering=0) as other, pytest.raises(OSError, match="28"):
        while True:
            other.write(bytes(4096))
    assert shutil.disk_usage(inside).free < 4096
    for id in kept:
        deleted = server.http.delete(f"/v1/responses/{id}")
        assert deleted.status_code == 200, deleted.text
    assert server.post("/v1/responses", BIG).json()["store"] is True
