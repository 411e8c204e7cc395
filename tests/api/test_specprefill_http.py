"""SpecPrefill as users meet it: on every protocol, streamed and whole, refused where it must be, and
through the deaths of engines.
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from api import tiny_folder
from api.endpoint import Endpoint
from api.endpoints import ALL, CHAT, COMPLETIONS, GENERATE, OLLAMA, turn
from conftest import Server

from millrace.llm import LLM

WORDS = " ".join(f"{k} apples and {k * 7 % 31} pears on the {k % 9}th table," for k in range(160))
SHAPE = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, default_model: Path) -> tuple[Path, Path]:
    home = tmp_path_factory.mktemp("specprefill")
    model = tiny_folder.make(home / "model", default_model, **SHAPE)
    draft = tiny_folder.make(home / "draft", default_model, **SHAPE, num_hidden_layers=1)
    return model, draft


@pytest.fixture(scope="module")
def server(folders: tuple[Path, Path]) -> Iterator[Server]:
    model, draft = folders
    file = model.parent / "millrace.toml"
    file.write_text(
        f'[models.sparse]\nmodel = "{model}"\nspecprefill-draft = "{draft}"\n'
        "specprefill-keep-pct = 0.2\npreload = true\n"
        f'[models.plain]\nmodel = "{model}"\npreload = true\n'
    )
    server = Server("--config", str(file), "--store", "none", "--prefill-chunk", "32").wait_ready()
    yield server
    server.stop()


def _counted(server: Server) -> dict[str, float]:
    text = server.http.get("/metrics").text
    found = re.findall(r'specprefill_tokens_total\{kind="(\w+)",model="sparse"\} (\S+)', text)
    return {kind: float(value) for kind, value in found}


def _body(endpoint: Endpoint, say: str = WORDS, **more: Any) -> dict[str, Any]:
    wishes = {"max_tokens": 6, "temperature": 0}
    return endpoint.body(turn(endpoint, say), **wishes) | {"model": "sparse"} | more


@pytest.mark.parametrize("endpoint", ALL, ids=str)
def test_streamed_and_whole_are_alike_and_cut_alike(server: Server, endpoint: Endpoint) -> None:
    say = f"On the {endpoint} side: {WORDS}"
    body = _body(endpoint, say, specprefill=True)
    before = _counted(server)
    whole = endpoint.whole(server.http, body)
    once = _counted(server)
    streamed = endpoint.stream(server.http, body)
    twice = _counted(server)
    assert streamed == whole
    plain = endpoint.whole(server.http, _body(endpoint, say))
    assert whole.prompt == plain.prompt > 2000, "the whole prompt is told"
    for kind in ("scored", "kept"):
        assert twice[kind] - once[kind] == once[kind] - before[kind] > 0
    assert once["scored"] - before["scored"] == whole.prompt
    assert once["kept"] - before["kept"] < 0.5 * whole.prompt


@pytest.mark.parametrize(
    ("endpoint", "more"),
    [
        (CHAT, {"extra_body": {"specprefill": True, "specprefill_keep_pct": 0.1}}),
        (COMPLETIONS, {"extra_body": {"specprefill": True}, "n": 2}),
        (GENERATE, {"sampling_params": {"specprefill": True, "max_new_tokens": 3}}),
        (OLLAMA, {"options": {"specprefill": True, "num_predict": 3}}),
    ],
    ids=["chat", "completions", "generate", "ollama"],
)
def test_the_fields_may_stand_where_clients_put_them(
    server: Server, endpoint: Endpoint, more: dict[str, Any]
) -> None:
    before = _counted(server)
    response = server.post(
        endpoint.path, {**_body(endpoint, f"{endpoint}: {WORDS}"), **more, "stream": False}
    )
    assert response.status_code == 200, response.text
    assert _counted(server)["kept"] > before["kept"]


@pytest.mark.parametrize("endpoint", ALL, ids=str)
def test_what_cannot_be_had_is_refused_on_every_protocol(
    server: Server, endpoint: Endpoint
) -> None:
    for more, word in (
        ({"specprefill": True, "model": "plain"}, "--specprefill-draft"),
        ({"specprefill_keep_pct": 0.5, "model": "plain"}, "--specprefill-draft"),
        ({"specprefill": True, "specprefill_keep_pct": 0}, "specprefill_keep_pct"),
        ({"specprefill": True, "specprefill_keep_pct": 1.01}, "specprefill_keep_pct"),
        ({"specprefill": True, "specprefill_keep_pct": -1e300}, "specprefill_keep_pct"),
        ({"specprefill": True, "specprefill_keep_pct": "0.3"}, "specprefill_keep_pct"),
        ({"specprefill": True, "specprefill_keep_pct": True}, "specprefill_keep_pct"),
        ({"specprefill": False, "specprefill_keep_pct": 2**70}, "specprefill_keep_pct"),
        ({"extra_body": {"specprefill_keep_pct": [0.3]}}, "specprefill_keep_pct"),
        ({"specprefill": "yes"}, "specprefill"),
        ({"specprefill": 1}, "specprefill"),
    ):
        response = server.post(endpoint.path, _body(endpoint, "hello") | more)
        assert response.status_code == 400, response.text
        assert word in endpoint.error(response)
    for number in ("NaN", "1e999", "1e-400", "-0.0", "Infinity"):
        body = json.dumps(_body(endpoint, "hello", specprefill_keep_pct="@")).replace('"@"', number)
        sent = {"content-type": "application/json"}
        response = server.http.post(endpoint.path, content=body, headers=sent)
        assert response.status_code == 400, (number, response.text)
        assert endpoint.error(response)
    response = server.post(
        endpoint.path,
        {**_body(endpoint, "hello", specprefill=False), "model": "plain", "stream": False},
    )
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("endpoint", "more"),
    [
        (COMPLETIONS, {"echo": True, "logprobs": 1}),
        (COMPLETIONS, {"prompt_logprobs": 1}),
        (GENERATE, {"return_logprob": True, "logprob_start_len": 0}),
    ],
    ids=["echo", "prompt_logprobs", "generate"],
)
def test_logprobs_of_the_prompt_exclude_it(
    server: Server, endpoint: Endpoint, more: dict[str, Any]
) -> None:
    response = server.post(endpoint.path, _body(endpoint, "hello", specprefill=True) | more)
    assert response.status_code == 400 and "logprobs" in endpoint.error(response)


def test_short_prompts_and_shares_of_one_run_whole(server: Server) -> None:
    before = _counted(server)
    for say, share in (("Hello there.", 0.2), (WORDS, 1.0)):
        whole = f"{say} For a share of {share}."
        body = _body(CHAT, whole, specprefill=True, specprefill_keep_pct=share)
        assert CHAT.whole(server.http, body) == CHAT.whole(server.http, _body(CHAT, whole))
    assert _counted(server) == before


def test_the_system_prompt_tools_and_the_last_message_stay(server: Server) -> None:
    """What was said between them is cut, and status says how much."""
    tool = {"name": "look", "parameters": {"type": "object", "properties": {}}}
    results = " ".join(f"line {k} of the result" for k in range(150))
    messages = [
        {"role": "system", "content": "You count fruit. " * 40},
        {"role": "user", "content": WORDS},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": results},
    ]
    body = {"model": "sparse", "messages": messages, "max_tokens": 4, "specprefill": True}
    body |= {"tools": [{"type": "function", "function": tool}], "specprefill_keep_pct": 0.01}
    before = _counted(server)
    found = server.post(CHAT.path, body).json()
    kept = _counted(server)["kept"] - before["kept"]
    ends = CHAT.whole(
        server.http, {"model": "sparse", "messages": [messages[0], messages[3]], "max_tokens": 1}
    )
    assert ends.prompt <= kept < found["usage"]["prompt_tokens"] - 1000


@pytest.mark.parametrize("phase", ["scoring", "prefill", "decode"])
def test_an_engine_that_dies_in_any_phase_leaves_the_text_as_it_was(
    server: Server, phase: str
) -> None:
    say = f"In the {phase} of things: {WORDS} {WORDS}"
    wishes = {"temperature": 0.8, "seed": 7, "max_tokens": 60, "ignore_eos": True}
    body = _body(CHAT, say, specprefill=True, **wishes)
    undisturbed = CHAT.stream(server.http, body)
    killed, over = threading.Event(), threading.Event()

    def watch() -> None:
        while not over.is_set():
            for model in server.http.get("/v1/status").json()["models"]:
                for request in model.get("requests") or []:
                    if model["name"] == "sparse" and request["phase"] == phase:
                        os.kill(model["engine_pid"], signal.SIGKILL)
                        killed.set()
                        return

    for _ in range(5):  # on a busy machine it may be over before it could be killed
        server.http.delete("/v1/cache")
        over.clear()
        watcher = threading.Thread(target=watch)
        watcher.start()
        found = CHAT.stream(server.http, body)
        over.set()
        watcher.join()
        assert found == undisturbed
        if killed.is_set():
            break
    assert killed.is_set()


def test_a_server_can_have_it_on(folders: tuple[Path, Path]) -> None:
    """In Python, where the switch is the same: above the threshold, unless a request says no."""
    model, draft = folders
    with LLM(
        str(model), specprefill_draft=str(draft), specprefill=True, specprefill_threshold=1000
    ) as llm:
        given = {"max_tokens": 6, "temperature": 0.0}
        found = llm.generate(WORDS, **given)
        active = llm._model.client.metrics
        assert "".join(llm.stream(WORDS, **given)) == found.text
        counter = active._all.sparse.labels(llm.name, "scored")._value
        scored = counter.get()
        assert scored == 2 * found.prompt_tokens > 4000
        llm.generate(WORDS, specprefill=False, **given)
        llm.generate("Hello.", **given)
        assert counter.get() == scored
        for share in (2.0, 0.0, math.nan, math.inf, -1, True, "0.3"):
            with pytest.raises(Exception, match="specprefill_keep_pct"):
                llm.generate(WORDS, specprefill_keep_pct=share)
