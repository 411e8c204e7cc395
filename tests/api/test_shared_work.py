"""Work that callers share, over HTTP: templates that do not end, and crowds of one caller."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from api import tiny_folder
from conftest import PATIENCE, Server, until

from millrace.text.template_renderer import LEAST_OUTPUT, OUTPUT_PER_INPUT

ENDLESS = (
    "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}"
    "{% endfor %}{% endfor %}{% endfor %}"
)
LONG = "{% for a in range(99999) %}{{ messages[0].content ~ '0123456789' * 1000 }}{% endfor %}"
LOUD = "{{ raise_exception('x' * 50000000) }}"
FOLDED = "{{ 9 ** (9 ** 9) }}"
HUGE = "{{ 'a' * (3 * 10 ** 9) }}"
HALVED = "{{ '\\ud800' }}{{ messages[0].content }}"
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


def with_template(folder: Path, default_model: Path, template: str) -> Path:
    made = tiny_folder.make(folder, default_model)
    (made / "chat_template.jinja").write_text(template)
    return made


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, default_model: Path) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("templates")
    good = tiny_folder.make(folder / "good", default_model)
    others = {"endless": ENDLESS, "long": LONG, "folded": FOLDED, "loud": LOUD, "huge": HUGE}
    others["halved"] = HALVED
    config = folder / "models.toml"
    torn = with_template(folder / "torn", default_model, "")
    (torn / "chat_template.jinja").unlink()
    settings = json.loads((torn / "tokenizer_config.json").read_text())
    settings["chat_template"] = "\0{{ messages }}\ud800"
    (torn / "tokenizer_config.json").unlink()
    (torn / "tokenizer_config.json").write_text(json.dumps(settings))
    lines = [f'[models.torn]\nmodel = "{torn}"\n']
    for name, template in others.items():
        path = with_template(folder / name, default_model, template)
        lines.append(f'[models.{name}]\nmodel = "{path}"\n')
    config.write_text("\n".join(lines))
    running = Server(str(good), "--name", "good", "--config", str(config), "--drain-timeout", "1")
    running.wait_ready()
    yield running
    running.stop()


def chat(server: Server, model: str) -> httpx.Response:
    return server.post("/v1/chat/completions", CHAT | {"model": model})


def children(server: Server, module: str) -> list[int]:
    found = subprocess.run(
        ["ps", "-A", "-o", "pid=,ppid=,args="], capture_output=True, text=True, check=True
    )
    rows = [line.split(maxsplit=2) for line in found.stdout.splitlines()]
    return [int(r[0]) for r in rows if int(r[1]) == server.process.pid and module in r[2]]


def test_a_template_that_never_ends_stops_no_other_model_and_is_named(models: Server) -> None:
    assert chat(models, "good").status_code == 200
    with ThreadPoolExecutor(4) as threads:
        endless = [threads.submit(chat, models, "endless") for _ in range(2)]
        assert until(lambda: children(models, "template_process"))
        assert chat(models, "good").status_code == 200
        assert models.health()["status"] == "ready"
        for future in endless:
            answer = future.result(PATIENCE)
            assert answer.status_code == 504, answer.text
            error = answer.json()["error"]
            assert error["code"] == "template_timeout" and "'endless'" in error["message"]
    (status,) = (
        m for m in models.http.get("/v1/status").json()["models"] if m["name"] == "endless"
    )
    assert status["template_timeouts"] == 2
    assert "endless: the chat template did not finish" in models.log()


def test_a_template_that_folds_constants_for_ever_ends_too(models: Server) -> None:
    assert chat(models, "folded").status_code in (400, 504)
    assert chat(models, "good").status_code == 200


def test_a_template_that_writes_without_end_is_refused(models: Server) -> None:
    answer = chat(models, "long")
    assert answer.status_code == 400
    assert "characters" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("model", "status", "words"),
    [
        ("endless", 504, "did not finish within 10 seconds"),
        ("long", 400, "wrote more than"),
        ("huge", 400, "MemoryError"),
        ("halved", 400, "half of a character"),
    ],
)
def test_a_large_prompt_lifts_no_limit_of_a_template(
    models: Server, model: str, status: int, words: str
) -> None:
    """Large prompts are rendered in the process that tokenises them."""
    text = "word " * 20_000
    answer = models.post(
        "/tokenize", {"model": model, "messages": [{"role": "user", "content": text}]}
    )
    assert answer.status_code == status, answer.text
    message = answer.json()["error"]["message"]
    assert words in message
    if found := re.search(r"more than (\d+) characters", message):
        assert int(found[1]) < 2 * LEAST_OUTPUT + OUTPUT_PER_INPUT * len(text)


def test_a_template_that_is_no_text_is_refused(models: Server) -> None:
    answer = chat(models, "torn")
    assert answer.status_code == 400
    assert "chat template cannot be written as UTF-8" in answer.json()["error"]["message"]


def test_a_templates_error_has_a_bounded_text(models: Server) -> None:
    answer = chat(models, "loud")
    assert answer.status_code == 400 and len(answer.content) < 4000


def test_clients_that_leave_take_their_waiting_requests_along(models: Server) -> None:
    for _ in range(20):
        with contextlib.suppress(httpx.TimeoutException):
            models.post("/v1/chat/completions", CHAT | {"model": "endless"}, timeout=0.1)
    time.sleep(1)
    before = timeouts(models)
    # One rendering may be under way; what waited behind it is gone.
    assert chat(models, "endless").status_code == 504
    assert timeouts(models) <= before + 3


def timeouts(server: Server) -> int:
    found = server.http.get("/v1/status").json()["models"]
    return next(int(m["template_timeouts"]) for m in found if m["name"] == "endless")


def test_a_server_ends_though_a_template_does_not(
    start: Callable[..., Server], tmp_path: Path, default_model: Path
) -> None:
    folder = with_template(tmp_path / "endless", default_model, ENDLESS)
    server = start(str(folder), "--name", "endless", "--drain-timeout", "1").wait_ready()
    with ThreadPoolExecutor(1) as threads:
        threads.submit(chat, server, "endless")
        assert until(lambda: children(server, "template_process"))
        time.sleep(0.5)
        assert server.stop(30) == 0
    assert not children(server, "template_process")


def large(server: Server, key: str) -> httpx.Response:
    body = {"prompt": "word " * 20_000, "max_tokens": 1}
    return server.post("/v1/completions", body, headers={"authorization": f"Bearer {key}"})


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory, default_model: Path) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("keyed")
    tiny = tiny_folder.make(folder / "tiny", default_model, max_position_embeddings=65536)
    running = Server(str(tiny), "--name", "tiny", "--api-key", "sk-a", "--api-key", "sk-b")
    running.wait_ready()
    yield running
    running.stop()


def test_ids_of_requests_are_a_callers_own(keyed: Server) -> None:
    def ask(key: str) -> httpx.Response:
        body = {"prompt": "Once", "max_tokens": 1, "ignore_eos": True}
        return keyed.post("/v1/completions", body, headers=head(key))

    def head(key: str) -> dict[str, str]:
        return {"authorization": f"Bearer {key}", "x-request-id": "mine"}

    body = {"prompt": "Once", "max_tokens": 2000, "ignore_eos": True, "stream": True}
    with httpx.stream(
        "POST",
        keyed.url + "/v1/completions",
        json={"model": "tiny", **body},
        headers=head("sk-a"),
        timeout=PATIENCE,
    ) as running:
        assert running.status_code == 200
        lines = running.iter_lines()
        next(lines)  # the first token came, so the request runs
        assert ask("sk-a").status_code == 400
        assert ask("sk-b").status_code == 200
        assert list(lines)[-2:] == ["data: [DONE]", ""]
    assert ask("sk-a").status_code == 200


def test_a_callers_crowd_of_large_prompts_leaves_a_process_for_others(keyed: Server) -> None:
    def workers() -> list[int]:
        return children(keyed, "millrace.text.worker")

    def done(futures: list[Future[Any]]) -> list[int]:
        return [f.result().status_code for f in futures if f.done()]

    with ThreadPoolExecutor(32) as threads:
        while len(workers()) < 2:
            first = [threads.submit(large, keyed, "sk-a") for _ in range(2)]
            assert all(f.result(PATIENCE).status_code == 200 for f in first)
        stopped = workers()
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        try:
            crowd = [threads.submit(large, keyed, "sk-a") for _ in range(24)]
            # 16 wait and two are being read.
            assert until(lambda: done(crowd).count(429) == 6), done(crowd)
            assert large(keyed, "sk-b").status_code == 200
            assert keyed.health()["status"] == "ready"
        finally:
            for pid in stopped:
                os.kill(pid, signal.SIGCONT)
        assert {f.result(PATIENCE).status_code for f in crowd} <= {200, 429}
