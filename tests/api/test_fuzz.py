"""Thousands of hostile requests to every endpoint: none is a fault of the server's.

`make test-fuzz` sends MILLRACE_FUZZ of them, others each time (the seed is printed; MILLRACE_SEED
repeats it); the normal run a sample that is always the same.
"""

from __future__ import annotations

import json
import os
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import scripted
from api import tiny_folder
from api.fuzzing import Fuzzer, Shot
from conftest import Server, until
from models import encoder_folders
from scripted import Rule

CASES = int(os.environ.get("MILLRACE_FUZZ", "0"))
SAMPLE = 240
SEED = int(os.environ.get("MILLRACE_SEED", os.getpid() if CASES else 0))
CLIENTS = 4


LOOK = scripted.call("look", x=1) + scripted.call("look", x="\\ud800")
RULES = [Rule("hi", scripted.think("Hm ☃.", f"I look.\n{LOOK}")), Rule("", "😀 done.")]


@pytest.fixture(scope="module", params=["random", "thinking", "encoder"])
def target(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, default_model: Path
) -> Iterator[Server]:
    """A tiny model with a small window, in a home of its own: nothing real can be deleted.

    The one babbles; another thinks and calls tools; the last makes numbers.
    """
    home = tmp_path_factory.mktemp("fuzz")
    if request.param == "random":
        model = tiny_folder.make(home / "tiny", default_model)
    elif request.param == "encoder":
        model = encoder_folders.encoder(home / "tiny")
    else:
        model = scripted.make(home / "tiny", default_model, RULES, "thinking")
    places = {"MILLRACE_HOME": str(home / "home"), "HF_HOME": str(home / "hub")}
    running = Server(
        str(model), "--name", "tiny", "--context", "160", "--max-body", "400000",
        "--trust-remote-code", env=places | {"HF_HUB_OFFLINE": "1"},
    ).wait_ready()  # fmt: skip
    yield running
    running.stop()


def _fault(response: httpx.Response) -> str | None:
    """What is wrong with an answer, if anything is."""
    if response.status_code >= 500:
        own = response.status_code == 504 and "within its timeout" in response.text
        return None if own else f"{response.status_code} {response.text[:400]}"
    if "server met an unexpected error" in response.text:
        return f"broken inside a {response.status_code}: {response.text[-400:]}"
    if response.status_code >= 400 and "error" not in response.json():
        return f"{response.status_code} without an error: {response.text[:200]}"
    return None


def _fire(target: Server, shot: Shot) -> httpx.Response:
    headers = {k.encode(): v.encode("latin-1") for k, v in shot.headers.items()}
    return target.http.request(
        shot.method, shot.path, content=shot.body, headers=headers, timeout=120
    )


def test_no_hostile_request_is_a_fault_of_the_servers(target: Server) -> None:
    fuzzer = Fuzzer(target.http.get("/openapi.json").json(), SEED)
    shots, turn = fuzzer.shots((CASES or SAMPLE) // 2), threading.Lock()
    seen, faults = Counter[int](), list[str]()

    def client(_: int) -> None:
        while True:
            with turn:
                shot = next(shots, None)
            if shot is None or len(faults) > 20:
                return
            try:
                response = _fire(target, shot)
            except httpx.TransportError as error:
                faults.append(f"{shot}: {error!r}")
                continue
            seen[response.status_code] += 1
            if fault := _fault(response):
                faults.append(f"{shot}: {fault}")

    with ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(client, range(CLIENTS)))
    print(f"{seen.total()} requests (MILLRACE_SEED={SEED}): {json.dumps(seen, sort_keys=True)}")
    assert not faults, "\n\n".join(faults)
    # A request may have said that the model should leave after it: it is back when it is needed.
    alive = {"/v1/completions": {"prompt": "Once", "max_tokens": 2}, "/embed": {"inputs": "Once"}}
    assert 200 in [target.post(path, body).status_code for path, body in alive.items()]
    assert target.health()["status"] == "ready"
    assert "the engine is gone" not in target.log()
    # Responses that were asked for in the background come to their end.
    until(lambda: not target.status()["requests"])
    assert target.status()["requests"] == []
