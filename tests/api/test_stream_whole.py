"""A stream tells what the whole answer tells, on every protocol: text, calls, thoughts, usage, end.

Sampled text comes from a tiny model; calls and thoughts from scripted ones, cut at every length.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import scripted
from api import tiny_folder
from api.endpoint import Endpoint, Said, frames
from api.endpoints import ALL, CHAT, COMPLETIONS, GENERATE, MESSAGES, TALKS, turn
from conftest import Server
from scripted import Rule, Style

SEED = 20261103
ODD = "Zürich ☃ 你好 😀 – done."
TOOLS = [
    {
        "name": "look",
        "description": "Looks.",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
    }
]


def _rules(style: Style) -> list[Rule]:
    look = scripted.call("look", style, at='the "sky" ☃', deep={"n": [1, 2.5]})
    before, after = "I look.\n", "\nThat was it."
    if style == "harmony":
        before = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
        after = ""
    return [
        Rule("one call", scripted.think("I must look – now.", before + look, style)),
        Rule("two calls", look + "\n" + scripted.call("look", at="sea") + after),
        Rule("not offered", scripted.think("Risky.", scripted.call("rm", style, path="/"), style)),
        Rule("think", scripted.think("Hm, 你好.\n\nWell ☃.", ODD, style)),
        Rule("", ODD),
    ]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, default_model: Path) -> Iterator[httpx.Client]:
    model = tiny_folder.make(tmp_path_factory.mktemp("whole") / "tiny", default_model)
    server = Server(str(model), "--store", "none").wait_ready()
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client
    server.stop()


@pytest.fixture(scope="module", params=["thinking", "harmony"])
def talker(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, default_model: Path
) -> Iterator[httpx.Client]:
    style: Style = request.param
    folder = tmp_path_factory.mktemp("whole") / style
    generated = scripted.make(folder, default_model, _rules(style), style)
    server = Server(str(generated), "--trust-remote-code", "--store", "none").wait_ready()
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client
    server.stop()


def _both(client: httpx.Client, endpoint: Endpoint, say: str, **wishes: Any) -> Said:
    body = endpoint.body(say, **wishes)
    whole, streamed = endpoint.whole(client, body), endpoint.stream(client, body)
    assert streamed == whole
    assert "".join(streamed.pieces) == whole.text
    return whole


@pytest.mark.parametrize("temperature", [0, 0.9])
@pytest.mark.parametrize("endpoint", ALL, ids=str)
def test_sampled_text(tiny: httpx.Client, endpoint: Endpoint, temperature: float) -> None:
    wishes = {"temperature": temperature, "seed": SEED, "max_tokens": 48}
    said = _both(tiny, endpoint, "Tell me of mills.", **wishes)
    assert (said.finish, said.generated) == ("length", 48)
    assert len(said.text) > 48
    other = endpoint.whole(tiny, endpoint.body("Tell me of mills.", **wishes | {"seed": 1}))
    assert (other.text == said.text) is (temperature == 0), "the seed decides, and nothing else"


@pytest.mark.parametrize("temperature", [0, 0.9])
def test_all_protocols_say_the_same(tiny: httpx.Client, temperature: float) -> None:
    """One prompt, one seed, one text: through four conversations and as raw tokens."""
    wishes = {"temperature": temperature, "seed": SEED, "max_tokens": 32}
    asked = {"messages": [{"role": "user", "content": "Tell me of mills."}]}
    prompt = tiny.post("/tokenize", json=asked).json()["tokens"]
    bodies = {e: e.body("Tell me of mills.", **wishes) for e in TALKS}
    bodies[COMPLETIONS] = COMPLETIONS.body("", **wishes) | {"prompt": prompt}
    bodies[GENERATE] = GENERATE.body("", **wishes) | {"input_ids": prompt}
    bodies[GENERATE].pop("text")
    with ThreadPoolExecutor(6) as pool:
        said = list(pool.map(lambda e: e.whole(tiny, bodies[e]), bodies))
    assert len({s.text for s in said}) == 1
    assert {(s.prompt, s.generated, s.finish) for s in said} == {(len(prompt), 32, "length")}


@pytest.mark.parametrize("endpoint", ALL, ids=str)
def test_text_that_a_stop_ends(tiny: httpx.Client, endpoint: Endpoint) -> None:
    wishes = {"temperature": 0.9, "seed": SEED, "max_tokens": 48}
    free = endpoint.whole(tiny, endpoint.body("Tell me of mills.", **wishes)).text
    stop = free[len(free) // 2 :][:5]
    said = _both(tiny, endpoint, "Tell me of mills.", stop=[stop], **wishes)
    assert (said.text, said.finish) == (free.partition(stop)[0], "stop")
    assert said.generated < 48


@pytest.mark.parametrize("endpoint", [CHAT, COMPLETIONS, GENERATE], ids=str)
def test_several_answers(tiny: httpx.Client, endpoint: Endpoint) -> None:
    body = endpoint.body("Once", n=3, temperature=0.9, seed=SEED, max_tokens=12)
    whole = tiny.post(endpoint.path, json=body).json()
    reported = [whole] if isinstance(whole, dict) else whole
    texts = [_text(c) for a in reported for c in a.get("choices", [a])]
    streamed = ["", "", ""]
    with endpoint.open(tiny, body) as response:
        for frame in _frames(response):
            if endpoint is GENERATE:
                streamed[frame["index"]] = frame["text"]
            for choice in frame.get("choices", []):
                streamed[choice["index"]] += _text(choice)
    assert streamed == texts
    assert len(set(texts)) == 3


def _frames(response: httpx.Response) -> list[dict[str, Any]]:
    *found, end = frames(response.iter_lines())
    assert end.data == "[DONE]"
    return [f.data for f in found]


def _text(choice: dict[str, Any]) -> str:
    message = choice.get("message") or choice.get("delta")
    return str((message.get("content") if message is not None else choice["text"]) or "")


SAYS = ["one call", "two calls", "not offered", "think", "hello"]


@pytest.mark.parametrize("temperature", [0, 0.9])
@pytest.mark.parametrize("endpoint", TALKS, ids=str)
def test_calls_and_thoughts(talker: httpx.Client, endpoint: Endpoint, temperature: float) -> None:
    wishes = {"temperature": temperature, "seed": SEED, "max_tokens": 200, "tools": TOOLS}

    def ask(say: str) -> Said:
        return _both(talker, endpoint, say, **wishes)

    with ThreadPoolExecutor(5) as pool:
        one, two, other, thought, plain = pool.map(ask, SAYS)
    assert [c.name for c in one.calls] == ["look"]
    assert (one.text, one.finish) == ("I look.", "calls")
    assert two.calls[0].name == "look" and two.finish == "calls"
    assert (other.calls, other.finish) == ((), "stop")
    assert (thought.text, plain.text) == (ODD, ODD)
    assert (plain.thought, plain.finish) == ("", "stop")
    assert (thought.thought, one.thought) == ("Hm, 你好.\n\nWell ☃.", "I must look – now.")
    assert thought.thinking is None or 0 < thought.thinking < thought.generated


def test_all_protocols_read_the_same(talker: httpx.Client) -> None:
    """Calls, thoughts and text are told apart alike, and counted alike."""
    for say in SAYS:
        said = [
            e.whole(talker, e.body(say, temperature=0, max_tokens=200, tools=TOOLS)) for e in TALKS
        ]
        read = {(s.text, s.thought, s.calls, s.finish, s.prompt, s.generated) for s in said}
        assert len(read) == 1, say
        assert len({s.thinking for s in said if s.thinking is not None}) == 1


@pytest.mark.parametrize("say", ["one call", "think"])
@pytest.mark.parametrize("endpoint", TALKS, ids=str)
def test_answers_cut_at_any_length(talker: httpx.Client, endpoint: Endpoint, say: str) -> None:
    wishes = {"temperature": 0, "max_tokens": 200, "tools": TOOLS}
    full = endpoint.whole(talker, endpoint.body(say, **wishes))

    def cut(limit: int) -> None:
        said = _both(talker, endpoint, say, **wishes | {"max_tokens": limit})
        assert (said.finish, said.generated) == ("length", limit)
        assert full.text.startswith(said.text.rstrip())
        assert full.thought.startswith(said.thought.rstrip())
        assert "<" not in said.text + said.thought, "a piece of markup"
        for mine, its in zip(said.calls, full.calls, strict=False):
            assert mine.name == its.name
            if endpoint is MESSAGES:  # an object even then: what was complete of it
                assert json.loads(mine.arguments).keys() <= json.loads(its.arguments).keys()
            else:
                assert its.arguments.startswith(mine.arguments)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(cut, range(1, full.generated, 3)))


@pytest.mark.parametrize("endpoint", ALL, ids=str)
def test_a_raw_prompt_and_a_conversation_end_alike(
    talker: httpx.Client, endpoint: Endpoint
) -> None:
    if endpoint.is_raw and talker.get("/v1/models").json()["data"][0]["id"] == "harmony":
        pytest.skip("ChatML is not how this model is spoken to")
    said = _both(talker, endpoint, turn(endpoint, "hello"), temperature=0.9, seed=SEED)
    assert (said.text, said.finish, said.matched) == (ODD, "stop", None)
