"""Completions in full: lists, several answers, echo and scores, streamed and whole; the middle."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from api import tiny_folder
from conftest import PATIENCE, Server, held

from millrace.text.tokenizer import Tokenizer

FIM = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>"]
BODY: dict[str, Any] = {"prompt": "Once", "max_tokens": 5, "temperature": 0, "ignore_eos": True}
RUNNING, QUEUE = 8, 24


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, default_model: Path) -> Path:
    """The tiny model, four of whose plain tokens are renamed to fill-in-the-middle markers."""
    folder = tiny_folder.make(tmp_path_factory.mktemp("full") / "tiny", default_model)
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    for at, text in enumerate(FIM):
        # Ids that SmolLM2's tokenizer keeps for names of repositories and the like.
        token = tokenizer["added_tokens"][-1 - at]
        old, token["content"] = token["content"], text
        if old in tokenizer["model"]["vocab"]:
            tokenizer["model"]["vocab"][text] = tokenizer["model"]["vocab"].pop(old)
    file.write_text(json.dumps(tokenizer))
    return folder


@pytest.fixture(scope="module")
def full(tiny: Path) -> Iterator[Server]:
    bounds = ("--max-running", str(RUNNING), "--max-queue", str(QUEUE))
    running = Server(str(tiny), "--name", "tiny", *bounds).wait_ready()
    yield running
    running.stop()


def _ask(server: Server, **more: Any) -> dict[str, Any]:
    response = server.post("/v1/completions", BODY | more)
    assert response.status_code == 200, response.text
    return dict(response.json())


def _streamed(server: Server, **more: Any) -> tuple[dict[int, dict[str, Any]], dict[str, Any]]:
    """The choices as their pieces make them, and the usage."""
    response = server.post(
        "/v1/completions", BODY | more | {"stream": True, "stream_options": {"include_usage": True}}
    )
    lines = [x.removeprefix("data: ") for x in response.text.splitlines() if x.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    choices: dict[int, dict[str, Any]] = {}
    usage: dict[str, Any] = {}
    for event in map(json.loads, lines):
        if not event["choices"]:
            assert not usage
            usage = event["usage"]
        for piece in event["choices"]:
            whole = choices.setdefault(piece["index"], {"text": "", "logprobs": None})
            assert "finish_reason" not in whole, "a piece after the finish"
            whole["text"] += piece["text"]
            if piece["logprobs"]:
                parts = whole["logprobs"] or {key: [] for key in piece["logprobs"]}
                whole["logprobs"] = {k: parts[k] + piece["logprobs"][k] for k in parts}
            if piece["finish_reason"]:
                whole["finish_reason"] = piece["finish_reason"]
    return choices, usage


@pytest.mark.parametrize(
    "more",
    [
        {"prompt": ["Once", "Twice upon", "a"]},
        {"prompt": ["Once", "Twice upon"], "n": 3, "temperature": 1, "seed": 7},
        {"prompt": [[1, 2, 3], [4]], "n": 2, "temperature": 1, "seed": 1},
        {"prompt": ["Once", "Twice upon"], "n": 2, "echo": True, "logprobs": 2, "seed": 3},
        {"prompt": "a", "echo": True, "logprobs": 0},
        {"prompt": ["Once", "a"], "echo": True},
        {"prompt": ["Once", "a"], "logprobs": 1, "n": 2},
    ],
)
def test_streamed_is_whole_in_every_combination(full: Server, more: dict[str, Any]) -> None:
    whole = _ask(full, **more)
    pieces, usage = _streamed(full, **more)
    assert usage["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert usage["prompt_tokens"] == whole["usage"]["prompt_tokens"]
    count = (len(more["prompt"]) if isinstance(more["prompt"], list) else 1) * more.get("n", 1)
    assert [c["index"] for c in whole["choices"]] == list(range(count)) == sorted(pieces)
    for choice in whole["choices"]:
        for key in ("text", "logprobs", "finish_reason"):
            assert _alike(pieces[choice["index"]][key], choice[key]), key


def _alike(one: Any, other: Any) -> bool:
    """Rows that run beside others may differ in the last bits of their scores."""
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) < 1e-4
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_alike(one[k], other[k]) for k in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_alike, one, other))
    return bool(one == other)


def test_an_echo_is_the_prompt_of_its_own_choice(full: Server) -> None:
    prompts = ["Once upon a time", "Twice"]
    choices = _ask(full, prompt=prompts, n=2, echo=True, logprobs=0, max_tokens=3)["choices"]
    for choice in choices:
        prompt = prompts[choice["index"] // 2]
        assert choice["text"].startswith(prompt)
        scores = choice["logprobs"]
        assert scores["token_logprobs"][0] is None
        assert all(isinstance(s, float) for s in scores["token_logprobs"][1:])
        assert "".join(scores["tokens"]).startswith(prompt)
        assert scores["text_offset"] == [
            len("".join(scores["tokens"][:k])) for k in range(len(scores["tokens"]))
        ]


def test_best_of_a_list_is_the_best_of_each(full: Server) -> None:
    asked = {"prompt": ["Once", "Twice"], "temperature": 1.0, "seed": 5}
    every = _ask(full, **asked, n=4, logprobs=0)["choices"]
    best = _ask(full, **asked, best_of=4, n=1)["choices"]

    def mean(choice: dict[str, Any]) -> float:
        scores = choice["logprobs"]["token_logprobs"]
        return float(sum(scores) / len(scores))

    for number in (0, 1):
        ranked = sorted(every[4 * number : 4 * number + 4], key=mean, reverse=True)
        assert best[number]["text"] == ranked[0]["text"]
    assert best[0]["logprobs"] is None


@pytest.mark.parametrize(
    "more", [{"n": 50}, {"prompt": ["Once"] * 50}, {"prompt": ["a"] * 25, "n": 2}]
)
def test_fifty_answers_are_fifty_however_asked(full: Server, more: dict[str, Any]) -> None:
    assert len(_ask(full, **more)["choices"]) == 50, "an idle server takes what is asked at once"
    body = BODY | {"max_tokens": 4000, "stream": True}
    with httpx.stream("POST", f"{full.url}/v1/completions", json=body, timeout=PATIENCE) as busy:
        lines = busy.iter_lines()
        next(lines)
        with held(full.engine):
            refused = full.post("/v1/completions", BODY | more)
            assert refused.status_code == 429
            assert refused.json()["error"]["code"] == "overloaded"
            running = full.status()["requests"]
            assert len(running) == 1, "none of the fifty was begun"
        few = full.post("/v1/completions", BODY | {"prompt": ["a"] * 12, "n": 2, "max_tokens": 1})
        assert few.status_code == 200


def test_a_list_with_one_bad_prompt_begins_nothing(full: Server) -> None:
    long = [1] * 9000
    refused = full.post("/v1/completions", BODY | {"prompt": [[1], [2], long]})
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    assert full.status()["requests"] == []


def test_there_is_a_most(full: Server) -> None:
    for more in ({"prompt": ["a"] * 2049}, {"prompt": ["a"] * 17, "n": 128}):
        refused = full.post("/v1/completions", BODY | more)
        assert refused.status_code == 400
        assert "2048" in refused.json()["error"]["message"]


def test_a_suffix_makes_a_prompt_of_both_sides(full: Server, tiny: Path) -> None:
    tokenizer = Tokenizer(tiny)
    prefix, suffix = "def f(x):\n", "\nprint(f(1))"
    marks = [tokenizer.vocabulary.id_of(m) for m in FIM[:3]]
    by_hand = [marks[0], *tokenizer.encode(prefix), marks[1], *tokenizer.encode(suffix), marks[2]]
    filled = _ask(full, prompt=prefix, suffix=suffix)
    assert filled["usage"]["prompt_tokens"] == len(by_hand)
    plain = _ask(full, prompt=by_hand)
    assert filled["choices"][0]["text"] == plain["choices"][0]["text"]
    several = _ask(full, prompt=[tokenizer.encode(prefix)] * 2, suffix=suffix)
    assert [c["text"] for c in several["choices"]] == [filled["choices"][0]["text"]] * 2
    pieces, _ = _streamed(full, prompt=prefix, suffix=suffix)
    assert pieces[0]["text"] == filled["choices"][0]["text"]


def test_a_full_middle_ends_the_answer(full: Server, tiny: Path) -> None:
    pad = Tokenizer(tiny).vocabulary.id_of("<|fim_pad|>")
    asked = {"suffix": "b", "logit_bias": {str(pad): 100}, "ignore_eos": False}
    choice = _ask(full, **asked)["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("", "stop")
    assert choice["matched_stop"] is None


def test_a_suffix_and_an_echo_are_refused_together(full: Server) -> None:
    refused = full.post("/v1/completions", BODY | {"suffix": "x", "echo": True})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "echo"


def test_a_model_without_a_middle_says_so(server: Server) -> None:
    refused = server.post("/v1/completions", BODY | {"suffix": "x"})
    error = refused.json()["error"]
    assert refused.status_code == 400
    assert (error["param"], error["code"]) == ("suffix", "unsupported_parameter")
    assert server.post("/v1/completions", BODY | {"suffix": "", "max_tokens": 1}).status_code == 200


def test_no_tokens_and_an_echo_score_a_prompt(full: Server) -> None:
    prompt = "Once upon a time"
    scored: dict[str, Any] = {"prompt": prompt, "echo": True, "logprobs": 2, "max_tokens": 0}
    answer = _ask(full, **scored)
    (choice,) = answer["choices"]
    more = _ask(full, **scored | {"max_tokens": 1})["choices"][0]["logprobs"]
    count = answer["usage"]["prompt_tokens"]
    assert (choice["text"], choice["finish_reason"]) == (prompt, "length")
    assert answer["usage"]["completion_tokens"] == 0
    assert choice["logprobs"]["tokens"] == more["tokens"][:count]
    assert _alike(choice["logprobs"], {k: v[:count] for k, v in more.items()})
    pieces, usage = _streamed(full, **scored)
    assert usage["completion_tokens"] == 0
    assert {k: _alike(pieces[0][k], choice[k]) for k in pieces[0]} == dict.fromkeys(pieces[0], True)
    several = _ask(full, **scored | {"prompt": ["a", "b c"], "n": 2, "logprobs": None})
    assert [c["text"] for c in several["choices"]] == ["a", "a", "b c", "b c"]
    for limit in ("max_tokens", "max_completion_tokens"):
        alone = full.post("/v1/completions", {"prompt": prompt, limit: 0})
        assert alone.status_code == 400 and "echo" in alone.json()["error"]["message"]


@pytest.mark.parametrize("prompt", ["long " * 9000, [7] * 9000, ["a", "long " * 9000]])
def test_errors_name_the_prompt(full: Server, prompt: Any) -> None:
    response = full.post("/v1/completions", BODY | {"prompt": prompt})
    error = response.json()["error"]
    assert response.status_code == 400
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")


CONTINUOUS = {"include_usage": True, "continuous_usage_stats": True}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_usage_comes_with_every_chunk_where_it_is_asked_for(full: Server, path: str) -> None:
    asked: dict[str, Any] = {"prompt": ["Once", "Twice upon a time"], "n": 2}
    if "chat" in path:
        asked = {"messages": [{"role": "user", "content": "hi"}], "n": 2}
    body = {k: v for k, v in BODY.items() if k != "prompt"} | asked | {"stream": True}
    response = full.post(path, body | {"stream_options": CONTINUOUS})
    lines = [x.removeprefix("data: ") for x in response.text.splitlines() if x.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    *chunks, last = [json.loads(line) for line in lines]
    assert last["choices"] == []
    usages: dict[int, list[dict[str, Any]]] = {}
    for chunk in chunks:
        usages.setdefault(chunk["choices"][0]["index"] // 2, []).append(chunk["usage"])
    for usage in usages.values():
        made = [u["completion_tokens"] for u in usage]
        assert made == sorted(made) and made[-1] == 10, "two choices of five tokens"
        assert len({u["prompt_tokens"] for u in usage}) == 1
        assert usage[-1]["total_tokens"] == usage[-1]["prompt_tokens"] + 10
    assert sum(u[-1]["total_tokens"] for u in usages.values()) == last["usage"]["total_tokens"]
    refused = full.post(path, body | {"stream_options": {"continuous_usage_stats": True}})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "stream_options.continuous_usage_stats"
