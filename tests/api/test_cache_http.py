"""The prefix cache from outside: what is reused, what is said of it, and who shares it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from api import scrape, tiny_folder, tiny_shapes
from api.cache_help import cached, chat, complete, report, run, text
from conftest import Gate, Server, until

from millrace.config import ApiKey, EngineConfig, ServeConfig
from millrace.errors import SetupError
from millrace.serving.warm_prompts import read_file

SYSTEM = {"role": "system", "content": "You keep a mill by a river. " * 12}


@pytest.fixture(scope="module")
def folder(default_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder.make(tmp_path_factory.mktemp("tiny"), default_model)


@pytest.fixture(scope="module")
def tiny(folder: Path) -> Iterator[Server]:
    running = Server(str(folder), "--name", "tiny", "--prefill-chunk", "16").wait_ready()
    yield running
    running.stop()


def _user(words: str) -> dict[str, Any]:
    return {"role": "user", "content": words}


def _assistant(words: str) -> dict[str, Any]:
    return {"role": "assistant", "content": words}


def _openai(usage: dict[str, Any]) -> tuple[int, int]:
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def _anthropic(usage: dict[str, Any]) -> tuple[int, int]:
    read = usage["cache_read_input_tokens"]
    return usage["input_tokens"] + usage["cache_creation_input_tokens"] + read, read


Ask = tuple[str, dict[str, Any], Callable[[dict[str, Any]], tuple[int, int]]]
PROTOCOLS: dict[str, Ask] = {
    "chat": (
        "/v1/chat/completions",
        {"messages": [_user(text(30, 1))], "max_tokens": 3},
        lambda body: _openai(body["usage"]),
    ),
    "completions": (
        "/v1/completions",
        {"prompt": text(30, 2), "max_tokens": 3},
        lambda body: _openai(body["usage"]),
    ),
    "messages": (
        "/v1/messages",
        {"messages": [_user(text(30, 3))], "max_tokens": 3},
        lambda body: _anthropic(body["usage"]),
    ),
    "responses": (
        "/v1/responses",
        {"input": text(30, 4), "max_output_tokens": 3, "store": False},
        lambda body: (
            body["usage"]["input_tokens"],
            body["usage"]["input_tokens_details"]["cached_tokens"],
        ),
    ),
    "generate": (
        "/generate",
        {"text": text(30, 5), "sampling_params": {"max_new_tokens": 3}},
        lambda body: (body["meta_info"]["prompt_tokens"], body["meta_info"]["cached_tokens"]),
    ),
}


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_the_same_prompt_twice(tiny: Server, protocol: str) -> None:
    path, body, read = PROTOCOLS[protocol]
    first, again, other = (
        read(tiny.post(path, body | {"cache_salt": f"{protocol} {salt}"}).json()) for salt in "aab"
    )
    assert first[0] == again[0] > 30
    assert [first[1], again[1], other[1]] == [0, again[0] - 1, 0]


def test_a_stream_tells_the_same(tiny: Server) -> None:
    prompt = text(40, 6)
    complete(tiny, prompt)
    body = {
        "prompt": prompt,
        "max_tokens": 2,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    lines = [x for x in tiny.post("/v1/completions", body).text.splitlines() if x]
    usage = json.loads(lines[-2].removeprefix("data: "))["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - 1


def test_turns_of_a_conversation(server: Server) -> None:
    """The default model, whose answers are its own history."""
    messages = [SYSTEM, _user("What does a mill do?")]
    before = 0
    for words in ("And at night?", "Who owns it?", ""):
        answer = chat(server, messages, max_tokens=8, cache_salt="turns")
        prompt = answer["usage"]["prompt_tokens"]
        # All but the answer's last token, which nothing was drawn from.
        assert cached(answer) >= before - 1
        before = prompt + answer["usage"]["completion_tokens"]
        said = answer["choices"][0]["message"]["content"]
        messages = [*messages, _assistant(said), _user(words)]


@pytest.fixture(scope="module", params=["qwen3_next", "gemma3_text"])
def hybrid(
    request: pytest.FixtureRequest, default_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """Models with state that cannot be cut: recurrent layers, and windows long since full."""
    generated = tiny_shapes.make(
        tmp_path_factory.mktemp(request.param), default_model, request.param
    )
    running = Server(str(generated), "--name", "tiny").wait_ready()
    yield running
    running.stop()


def test_turns_of_a_hybrid(hybrid: Server) -> None:
    history = [SYSTEM, _user("What does a mill do?")]
    before = chat(hybrid, history)
    for number in range(3):
        # The history holds another answer than the one that was made, as agents' often does.
        history = [*history, _assistant(text(9, number)), _user(f"And then, {number}?")]
        answer = chat(hybrid, history)
        assert cached(answer) >= before["usage"]["prompt_tokens"] - 1
        cold = chat(hybrid, history, cache_salt=f"cold {number}")
        assert cached(cold) == 0
        assert answer["choices"][0]["message"] == cold["choices"][0]["message"]
        before = answer
    edited = [*history[:-1], _user("Something else altogether.")]
    assert run(chat(hybrid, edited)) < 20
    other = chat(hybrid, [SYSTEM, _user("A new conversation.")])
    assert run(other) < 20 < cached(other)


def test_a_client_that_drops_in_the_middle_of_a_prefill(tiny: Server) -> None:
    def prefilled() -> float:
        return scrape.total(tiny, "millrace_prefilled_tokens_total")

    prompt = text(3000, 7)
    whole = complete(tiny, prompt, 1, cache_salt="cold")["usage"]["prompt_tokens"]
    assert whole > 3000
    before, body = prefilled(), {"prompt": prompt, "max_tokens": 1, "stream": True}
    with tiny.http.stream("POST", "/v1/completions", json=body):
        assert until(lambda: prefilled() - before > whole / 2)
    assert until(lambda: not tiny.status()["requests"])
    assert run(complete(tiny, prompt, 1)) <= 0.6 * whole


def test_what_many_share_is_held_once(tiny: Server) -> None:
    tiny.http.delete("/v1/cache")
    head = text(1900, 8)
    one = complete(tiny, head, 1)
    assert one["usage"]["prompt_tokens"] > 2000
    held = report(tiny)["memory"]["bytes"]
    with ThreadPoolExecutor(32) as pool:
        answers = list(pool.map(lambda i: complete(tiny, f"{head} {i} {i}", 1), range(32)))
    assert all(cached(a) >= 2000 for a in answers)
    # What is each one's own lies in a page of its own.
    page = 32 * held / one["usage"]["prompt_tokens"]
    assert held < report(tiny)["memory"]["bytes"] <= 1.02 * held + 32 * page


def test_the_report_and_the_metrics(tiny: Server) -> None:
    def counted() -> dict[str, float]:
        return {
            kind: scrape.total(tiny, "millrace_cache_hits_total", kind=kind)
            for kind in ("exact", "prefix", "checkpoint", "disk", "none")
        }

    before, hits = report(tiny), counted()
    prompt = text(50, 9)
    first = complete(tiny, prompt)
    complete(tiny, prompt)
    complete(tiny, prompt + " and more words")
    after = report(tiny)
    length = first["usage"]["prompt_tokens"]
    kinds = {k: n - before["hits"][k] for k, n in after["hits"].items()}
    assert kinds == {"exact": 1, "prefix": 1, "checkpoint": 0, "disk": 0, "none": 1}
    assert {k: n - hits[k] for k, n in counted().items()} == kinds
    memory, earlier = after["memory"], before["memory"]
    assert memory["hits"] - earlier["hits"] == 2
    assert memory["tokens_saved"] - earlier["tokens_saved"] >= 2 * length - 2
    assert memory["tokens"] - earlier["tokens"] >= length
    assert earlier["bytes"] < memory["bytes"] <= memory["budget"]
    assert after["enabled"] and after["disk"] is None
    assert scrape.total(tiny, "millrace_cache_bytes", tier="memory") == memory["bytes"]


@pytest.mark.parametrize("path", ["/v1/cache", "/flush_cache"])
def test_emptying(tiny: Server, path: str) -> None:
    prompt = text(40, 10)
    complete(tiny, prompt)
    assert cached(complete(tiny, prompt)) > 0
    held = report(tiny)["memory"]["bytes"]
    if path == "/v1/cache":
        reported = tiny.http.delete(f"{path}").json()
        assert reported == {"dropped": [{"name": "tiny", "memory_bytes": held, "disk_bytes": 0}]}
    else:
        assert tiny.post(path, {}).text == "Cache flushed."
    empty = report(tiny)["memory"]
    assert (empty["bytes"], empty["entries"], empty["tokens"]) == (0, 0, 0)
    assert scrape.total(tiny, "millrace_cache_bytes", tier="memory") == 0
    assert cached(complete(tiny, prompt)) == 0


def test_warming(tiny: Server) -> None:
    tool = {"type": "function", "function": {"name": "grind", "parameters": {"type": "object"}}}
    system = {"role": "system", "content": text(60, 11)}
    head = {"messages": [system], "tools": [tool]}
    body = {
        "prompts": [text(60, 12), text(60, 12) + " and on"],
        "conversations": [head],
        "cache_salt": "w",
    }
    done = tiny.post("/v1/cache/warm", body).json()
    first, second, third = done["items"]
    assert first["cached_tokens"] == 0 and third["cached_tokens"] == 0
    assert second["prefilled_tokens"] <= 3
    assert done["prefilled_tokens"] == sum(i["prefilled_tokens"] for i in done["items"])
    answer = chat(tiny, [system, _user("Well?")], tools=[tool], cache_salt="w")
    assert cached(answer) >= third["prompt_tokens"] - 1
    assert run(complete(tiny, text(60, 12), cache_salt="w")) == 1


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompts"),
        ({"prompts": [""]}, "prompts[0]"),
        ({"conversations": [{"messages": []}]}, "conversations[0].messages"),
        ({"prompts": ["x"], "cache_salt": 5}, "cache_salt"),
    ],
)
def test_warming_nothing(tiny: Server, body: dict[str, Any], param: str) -> None:
    response = tiny.post("/v1/cache/warm", body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_salts_share_nothing(tiny: Server) -> None:
    prompt = text(40, 13)
    found = [cached(complete(tiny, prompt, cache_salt=salt)) for salt in ("a", "b", "a", "c")]
    assert found == [0, 0, found[2], 0] and found[2] > 40


def test_while_the_engine_starts_and_restarts(
    start: Callable[..., Server], folder: Path, tmp_path: Path
) -> None:
    gate = Gate(tmp_path)
    server = start(str(folder), env=gate.env)
    while True:
        try:
            assert server.http.get("/v1/cache").status_code == 200  # once it is ready
            break
        except httpx.ConnectError:
            time.sleep(0.02)
    server.wait_ready()
    with gate.closed():
        server.kill_engine()
        response = server.http.get("/v1/cache")
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "engine_unavailable"
    server.restarted()
    assert report(server)["enabled"]


def test_keys_share_nothing(start: Callable[..., Server], folder: Path) -> None:
    options = ("--api-key", "one", "--api-key", "two", "--cache-isolation", "key")
    server = start(str(folder), *options).wait_ready()
    body = {"prompt": text(40, 14), "max_tokens": 1}

    def ask(key: str, **more: Any) -> int:
        headers = {"authorization": f"Bearer {key}"}
        return cached(server.post("/v1/completions", body | more, headers=headers).json())

    assert [ask("one"), ask("two"), ask("two", cache_salt="x"), ask("two", cache_salt="x")] == [
        0,
        0,
        0,
        ask("one"),
    ]


def test_warm_from_a_file_without_volatile_lines(
    start: Callable[..., Server], folder: Path, tmp_path: Path
) -> None:
    words = "You are a miller.\nToday's date: {}\n" + text(60, 15)
    file = tmp_path / "warm.jsonl"
    system = {"role": "system", "content": words.format("2020-02-02")}
    lines = [{"messages": [system]}, {"prompt": text(60, 16), "cache_salt": "f"}]
    file.write_text("\n\n".join(map(json.dumps, lines)))
    server = start(str(folder), "--warm", str(file), "--strip-volatile", "auto").wait_ready()
    assert until(lambda: "2 of 2 prompts" in server.log())
    assert run(complete(server, text(60, 16), cache_salt="f")) == 1
    system = {"role": "system", "content": words.format("2033-03-03")}
    for path, body in {
        "/v1/chat/completions": {"messages": [system, _user("Hm?")], "max_tokens": 1},
        "/v1/messages": {"system": system["content"], "messages": [_user("Hm?")], "max_tokens": 1},
        "/v1/responses": {"instructions": system["content"], "input": "Hm?", "store": False},
        "/api/chat": {"messages": [system, _user("Hm?")], "options": {"num_predict": 1}},
    }.items():
        for stream in (False, True):
            limit = {"max_output_tokens": 1} if "responses" in path else {}
            response = server.post(path, body | limit | {"stream": stream})
            assert response.status_code == 200
            assert response.headers["x-millrace-stripped"] == "1 line", path
    plain = server.post("/v1/chat/completions", {"messages": [_user("Hm?")], "max_tokens": 1})
    assert "x-millrace-stripped" not in plain.headers
    reported = server.post(
        "/v1/chat/completions", {"messages": [system, _user("Hm?")], "max_tokens": 1}
    )
    assert run(reported.json()) <= 8
    assert server.log().count("volatile lines are taken out") == 1


def test_a_server_without_a_cache(start: Callable[..., Server], folder: Path) -> None:
    server = start(str(folder), "--no-cache").wait_ready()
    prompt = text(40, 17)
    complete(server, prompt)
    assert cached(complete(server, prompt)) == 0
    reported = report(server)
    assert not reported["enabled"] and reported["memory"]["bytes"] == 0
    assert server.post("/v1/cache/warm", {"prompts": ["x"]}).status_code == 400
    assert server.post("/flush_cache", {}).text == "There is no cache to flush."


def test_options_that_contradict_themselves(tmp_path: Path) -> None:
    engine = EngineConfig(model="m", name="m")
    with pytest.raises(SetupError, match="API keys"):
        ServeConfig(engine=engine, cache_isolation="key")
    key = ApiKey(secret="s")
    with pytest.raises(SetupError, match="--warm"):
        ServeConfig(engine=engine, cache_isolation="key", api_keys=(key,), warm="f")
    with pytest.raises(SetupError, match="--cache-memory"):
        EngineConfig(model="m", name="m", cache_memory=0)
    file = tmp_path / "warm.jsonl"
    for line, word in (("{", "line 2"), ('{"prompt": 5}', "str"), ("{}", "give a prompt")):
        file.write_text(f'{{"prompt": "x"}}\n{line}\n')
        with pytest.raises(SetupError, match=word):
            read_file(str(file))
