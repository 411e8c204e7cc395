"""What requests get that say nothing, and what the server tells of itself at the start and later."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from api import tiny_folder
from api.endpoint import Endpoint
from api.endpoints import ALL, GENERATE
from conftest import Server

every = pytest.mark.parametrize("endpoint", ALL, ids=str)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, default_model: Path) -> Path:
    return tiny_folder.make(tmp_path_factory.mktemp("defaults") / "tiny", default_model)


@pytest.fixture(scope="module")
def tiny(folder: Path) -> Iterator[Server]:
    """Greedy unless asked otherwise, and brief."""
    options = ("--temperature", "0", "--top-p", "0.9", "--top-k", "7", "--max-tokens", "5")
    # A window that an answer without end soon fills.
    options += ("--context", "512")
    running = Server(str(folder), "--store", "none", *options).wait_ready()
    yield running
    running.stop()


def _body(endpoint: Endpoint, **wishes: Any) -> dict[str, Any]:
    body = endpoint.body("Once", **wishes)
    if endpoint.path == "/v1/messages" and "max_tokens" not in wishes:
        body["max_tokens"] = 5
    return body


@every
def test_the_servers_defaults_hold_where_a_request_says_nothing(
    tiny: Server, endpoint: Endpoint
) -> None:
    greedy = endpoint.whole(tiny.http, _body(endpoint))
    again = endpoint.whole(tiny.http, _body(endpoint))
    assert greedy.text == again.text
    limit = 128 if endpoint is GENERATE else 5
    assert greedy.generated <= limit, "SGLang's own default is the protocol's"
    drawn = {
        endpoint.whole(tiny.http, _body(endpoint, temperature=1.0, seed=seed, max_tokens=6)).text
        for seed in range(4)
    }
    assert len(drawn) > 1


def test_a_request_has_the_last_word(tiny: Server) -> None:
    body = {"prompt": "Once", "ignore_eos": True}
    assert tiny.post("/v1/completions", body).json()["usage"]["completion_tokens"] == 5
    asked = tiny.post("/v1/completions", body | {"max_tokens": 9}).json()
    assert asked["usage"]["completion_tokens"] == 9
    response = tiny.post("/v1/responses", {"input": "hi", "top_p": 0.5, "max_output_tokens": 2})
    assert (response.json()["temperature"], response.json()["top_p"]) == (0.0, 0.5)
    told = tiny.http.get("/get_model_info").json()["preferred_sampling_params"]
    assert told == {"temperature": 0.0, "top_p": 0.9, "top_k": 7}
    (card,) = tiny.http.get("/v1/models").json()["data"]
    neutral = {"min_p": 0.0, "repetition_penalty": 1.0}
    assert card["default_sampling_params"] == told | neutral | {"max_tokens": 5}
    free = {"options": {"num_predict": -1, "stop": ["never"]}, "prompt": "Once", "stream": False}
    assert tiny.post("/api/generate", free).json()["eval_count"] > 5


@pytest.mark.parametrize(
    "option", [("--temperature", "-1"), ("--top-p", "0"), ("--max-tokens", "0"), ("--min-p", "2")]
)
def test_a_default_out_of_range_is_refused_at_the_start(
    folder: Path, start: Callable[..., Server], option: tuple[str, str]
) -> None:
    running = start(str(folder), *option)
    assert running.process.wait(60) != 0
    assert option[0] in running.log()


def test_status_tells_memory_and_totals(tiny: Server) -> None:
    before = tiny.status()["totals"]
    memory = tiny.status()["device_memory"]
    assert set(memory) == {"active", "peak", "cached", "total"}
    assert 0 < memory["active"] <= memory["peak"] < memory["total"]
    body = {"prompt": "One two three", "max_tokens": 4, "ignore_eos": True, "n": 2}
    usage = tiny.post("/v1/completions", body).json()["usage"]
    status = tiny.status()
    after = status["totals"]
    assert after["requests"] == before["requests"] + 1
    assert after["prompt_tokens"] - before["prompt_tokens"] == usage["prompt_tokens"]
    assert after["generated_tokens"] - before["generated_tokens"] == usage["completion_tokens"]
    assert status["device_memory"]["peak"] >= status["device_memory"]["active"] > 0
    assert "millrace_device_bytes" in tiny.http.get("/metrics").text


def test_a_line_at_the_start_says_which_markers_were_found(tiny: Server) -> None:
    assert "tool calls: " in tiny.log() and "reasoning: " in tiny.log()
