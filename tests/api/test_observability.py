"""What the server tells of itself: metrics, the status of every request, structured logs."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
from api import scrape
from conftest import PATIENCE, Server, held, until

SHORT = {"prompt": "Once", "max_tokens": 4, "temperature": 0}
FAMILIES = {
    "millrace_requests": "counter",
    "millrace_prompt_tokens": "counter",
    "millrace_cached_tokens": "counter",
    "millrace_prefilled_tokens": "counter",
    "millrace_generated_tokens": "counter",
    "millrace_engine_restarts": "counter",
    "millrace_running": "gauge",
    "millrace_queued": "gauge",
    "millrace_kv_bytes": "gauge",
    "millrace_time_to_first_token_seconds": "histogram",
    "millrace_inter_token_seconds": "histogram",
    "millrace_request_seconds": "histogram",
    "millrace_step_seconds": "histogram",
}


def test_metrics_have_every_family(server: Server) -> None:
    server.post("/v1/completions", SHORT)
    assert FAMILIES.items() <= scrape.families(server).items()
    assert scrape.label_names(server, "millrace_requests_total") == {
        "endpoint",
        "model",
        "outcome",
    }
    for family in FAMILIES:
        total = f"{family}_total" if FAMILIES[family] == "counter" else family
        sample = f"{family}_count" if FAMILIES[family] == "histogram" else total
        assert "model" in scrape.label_names(server, sample), f"{family} has no sample"


def test_metrics_count_what_happened(server: Server) -> None:
    def counted() -> dict[str, float]:
        where = {"endpoint": "/v1/chat/completions", "model": "smollm2", "outcome": "ok"}
        names = ("prompt_tokens_total", "generated_tokens_total", "prefilled_tokens_total")
        hists = ("time_to_first_token_seconds", "inter_token_seconds", "request_seconds")
        return {
            "requests": scrape.total(server, "millrace_requests_total", **where),
            **{n: scrape.total(server, f"millrace_{n}") for n in names},
            **{n: scrape.total(server, f"millrace_{n}_count") for n in hists},
        }

    before = counted()
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "ignore_eos": True}
    salted = body | {"cache_salt": "metrics"}  # nothing another test computed may be found
    usage = server.post("/v1/chat/completions", salted).json()["usage"]
    after = counted()
    assert {name: after[name] - before[name] for name in after} == {
        "requests": 1,
        "prompt_tokens_total": usage["prompt_tokens"],
        "generated_tokens_total": 5,
        "prefilled_tokens_total": usage["prompt_tokens"],
        "time_to_first_token_seconds": 1,
        "inter_token_seconds": 4,
        "request_seconds": 1,
    }


def test_restarts_and_outcomes_are_counted(start: Callable[..., Server]) -> None:
    server = start().wait_ready()
    server.kill_engine()
    server.restarted()
    assert scrape.total(server, "millrace_engine_restarts_total") == 1
    long = SHORT | {"max_tokens": 4000, "ignore_eos": True}
    server.post("/v1/completions", long | {"timeout": 0.4})
    with httpx.stream(
        "POST", f"{server.url}/v1/completions", json=long | {"stream": True}, timeout=PATIENCE
    ) as response:
        next(response.iter_lines())
    assert until(lambda: not server.status()["requests"])
    for outcome in ("timeout", "disconnected"):
        assert scrape.total(server, "millrace_requests_total", outcome=outcome) == 1


def test_the_status_names_every_request(start: Callable[..., Server]) -> None:
    """One answers, one is in prefill, one waits for a row."""
    server = start("--max-running", "2").wait_ready()
    engine = server.engine

    def wait_for(id: str, phase: str) -> None:
        found = until(lambda: _by_id(server).get(id, {}).get("phase") == phase)
        assert found, (id, phase, _by_id(server))

    def send(id: str, body: dict[str, Any]) -> httpx.Response:
        return server.post("/v1/completions", body, headers={"x-request-id": id})

    with ThreadPoolExecutor(3) as pool:
        try:
            pool.submit(
                send, "answers", SHORT | {"max_tokens": 4000, "ignore_eos": True, "priority": 3}
            )
            wait_for("answers", "decode")
            assert until(lambda: _by_id(server)["answers"]["made_tokens"] > 1)
            pool.submit(send, "prompt", SHORT | {"prompt": "A long one, this. " * 1000})
            wait_for("prompt", "prefill")
            with held(engine):  # what is under way stays so
                pool.submit(send, "waits", SHORT)
                wait_for("waits", "queued")
                requests = _by_id(server)
        finally:
            for id in ("answers", "prompt", "waits"):
                server.post(f"/v1/requests/{id}/cancel", None)

    assert list(requests) == ["answers", "prompt", "waits"]
    assert {r["endpoint"] for r in requests.values()} == {"/v1/completions"}
    assert {r["cached_tokens"] for r in requests.values()} == {0}

    answers = requests["answers"]
    assert (answers["phase"], answers["progress"], answers["priority"]) == ("decode", 1.0, 3)
    assert answers["prefilled_tokens"] == answers["prompt_tokens"] == 1
    assert 1 < answers["made_tokens"] < answers["max_tokens"] == 4000
    assert 0 < answers["ttft_seconds"] < answers["age_seconds"]
    assert answers["tokens_per_second"] > 0

    prompt = requests["prompt"]
    assert (prompt["phase"], prompt["made_tokens"], prompt["ttft_seconds"]) == ("prefill", 0, None)
    assert prompt["prompt_tokens"] > 4000
    assert 0 < prompt["prefilled_tokens"] < prompt["prompt_tokens"]
    done = prompt["prefilled_tokens"] / prompt["prompt_tokens"]
    assert abs(prompt["progress"] - done) < 0.001

    waits = requests["waits"]
    assert (waits["phase"], waits["progress"], waits["priority"]) == ("queued", 0.0, 0)
    assert (waits["ttft_seconds"], waits["tokens_per_second"]) == (None, None)


def _by_id(server: Server) -> dict[str, dict[str, Any]]:
    return {r["id"]: r for r in server.status()["requests"]}


def test_json_logs_are_one_object_a_line_with_the_request_id(
    start: Callable[..., Server],
) -> None:
    server = start("--log-format", "json").wait_ready()
    server.post("/v1/completions", SHORT, headers={"x-request-id": "logged-1"})
    server.post("/v1/chat/completions", {"messages": []})
    with socket.create_connection(("127.0.0.1", server.port)) as odd:
        odd.sendall(b"this is not HTTP\r\n\r\n")
        odd.recv(1000)
    server.kill_engine()
    server.restarted()
    lines = _stop_and_read(server)

    records = [json.loads(line) for line in lines]
    assert all({"time", "level", "logger", "message"} <= r.keys() for r in records)
    (ended,) = [r for r in records if r.get("id") == "logged-1"]
    assert ended["outcome"] == "ok"
    assert ended["endpoint"] == "/v1/completions"
    assert (ended["prompt_tokens"], ended["generated_tokens"]) == (1, 4)
    assert ended["seconds"] >= ended["ttft"] > 0
    assert any(r["level"] == "error" and "engine is gone" in r["message"] for r in records)


def test_text_logs_carry_the_request_id_too(server: Server) -> None:
    server.post("/v1/completions", SHORT, headers={"x-request-id": "logged-2"})
    assert until(lambda: "logged-2" in server.log())
    (line,) = [x for x in server.log().splitlines() if "logged-2" in x]
    assert line.endswith(" id=logged-2") and " info request ended outcome=ok " in line


def test_text_logs_are_short_and_end_with_a_short_id(server: Server) -> None:
    long = "x-" * 50 + "0123abcd"
    made = server.post(
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "hi"}]} | {"max_tokens": 2},
    ).json()["id"]
    server.post("/v1/completions", SHORT, headers={"x-request-id": long})
    refused = {"x-request-id": "refused-because-of-its-model-7"}
    server.post("/v1/completions", SHORT | {"model": "m" * 500}, headers=refused)
    ends = [f" id=…{id[-8:]}" for id in (made, long, refused["x-request-id"])]
    assert until(lambda: all(end in server.log() for end in ends))
    found = [x for x in server.log().splitlines() if x.endswith(tuple(ends))]
    assert len(found) == 3 and max(map(len, found)) <= 200, found
    assert " info request refused status=404 reason=" in found[2]


def _stop_and_read(server: Server) -> list[str]:
    assert server.stop() == 0
    return [line for line in server.log().splitlines() if line]
