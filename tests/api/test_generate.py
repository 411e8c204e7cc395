"""SGLang's /generate: requests of every kind, streamed and whole, and what is wrong with some."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from api import tiny_folder
from conftest import PATIENCE, Server, until

from millrace.text.tokenizer import Tokenizer

GREEDY = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, default_model: Path) -> Iterator[Server]:
    model = tiny_folder.make(tmp_path_factory.mktemp("generate") / "tiny", default_model)
    running = Server(str(model)).wait_ready()
    yield running
    running.stop()


@pytest.fixture(scope="module")
def tokenizer(default_model: Path) -> Tokenizer:
    return Tokenizer(default_model)


def _whole(server: Server, body: dict[str, Any]) -> Any:
    response = server.post("/generate", body)
    assert response.status_code == 200, response.text
    return response.json()


def _chunks(server: Server, body: dict[str, Any]) -> list[dict[str, Any]]:
    with httpx.stream(
        "POST", f"{server.url}/generate", json=body | {"stream": True}, timeout=120
    ) as response:
        lines = [line for line in response.iter_lines() if line and line != ": keep-alive"]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def _timeless(answer: dict[str, Any]) -> dict[str, Any]:
    """Without what differs from call to call."""
    differs = ("id", "e2e_latency", "cached_tokens")
    meta = {k: v for k, v in answer["meta_info"].items() if k not in differs}
    return {"text": answer["text"], "output_ids": answer["output_ids"], "meta_info": meta}


def _near(value: Any) -> Any:
    """The same prompt may be run in other pieces, which moves the last digits of a logprob."""
    if isinstance(value, float):
        return pytest.approx(value, abs=1e-4)
    if isinstance(value, dict):
        return {k: _near(v) for k, v in value.items()}
    return [_near(v) for v in value] if isinstance(value, list) else value


def _error(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return dict(error)


def test_the_stop_table(server: Server, tokenizer: Tokenizer) -> None:
    five, six = (tokenizer.encode(digit)[0] for digit in "56")
    cases: list[tuple[dict[str, Any], Any, str]] = [
        ({"stop": ["6"]}, "6", "5\n"),
        ({"stop": "6"}, "6", "5\n"),
        ({"stop_token_ids": [five, six]}, five, ""),
        ({"stop": ["5"], "stop_token_ids": [six]}, "5", ""),
        ({"stop": ["hello world", "6\n7"]}, "6\n7", "5\n"),
        ({"stop": ["6\n7\n8", "6\n7", "7"]}, "6\n7\n8", "5\n"),
        ({"stop": ["6\n7"], "no_stop_trim": True}, "6\n7", "5\n6\n7"),
        ({"stop_token_ids": [six], "no_stop_trim": True}, six, "5\n6"),
        (
            {"stop_token_ids": [six], "no_stop_trim": True, "skip_special_tokens": False},
            six,
            "5\n6",
        ),
    ]

    def check(case: tuple[dict[str, Any], Any, str]) -> None:
        more, matched, text = case
        params = {"temperature": 0, "max_new_tokens": 200, **more}
        body = {"text": "1\n2\n3\n4\n", "sampling_params": params}
        whole = _whole(server, body)
        meta = whole["meta_info"]
        assert meta["matched_stop"] == matched, more
        assert type(meta["matched_stop"]) is type(matched)
        assert meta["finish_reason"] == {"type": "stop", "matched": matched}
        assert whole["text"] == text
        assert len(whole["output_ids"]) == meta["completion_tokens"]
        chunks = _chunks(server, body)
        assert _timeless(chunks[-1]) == _timeless(whole)
        texts = [c["text"] for c in chunks]
        assert all(b.startswith(a) for a, b in itertools.pairwise(texts)), "cumulative"

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(check, cases))


def test_the_ends(server: Server, tokenizer: Tokenizer) -> None:
    text = "<|im_start|>user\nSay: hi<|im_end|>\n<|im_start|>assistant\n"
    params = {"temperature": 0, "max_new_tokens": 60, "regex": "hi"}
    ended = _whole(server, {"text": text, "sampling_params": params})
    assert (ended["text"], ended["meta_info"]["matched_stop"]) == ("hi", None)
    assert ended["meta_info"]["finish_reason"] == {"type": "stop", "matched": None}
    end = min(tokenizer.eos_ids)
    shown = {"temperature": 0, "logit_bias": {str(end): 100}, "no_stop_trim": True}
    for skip, seen in ((True, ""), (False, tokenizer.vocabulary.added[end])):
        shown["skip_special_tokens"] = skip
        ended = _whole(server, {"text": text, "sampling_params": shown})
        assert (ended["text"], ended["output_ids"]) == (seen, [end])
    cut = _whole(server, {"text": text, "sampling_params": params | {"max_new_tokens": 1}})
    assert cut["meta_info"]["finish_reason"] in (
        {"type": "length", "length": 1},
        {"type": "stop", "matched": None},
    )
    limited = _whole(server, {"text": "1 2 3", "sampling_params": GREEDY})
    assert limited["meta_info"]["finish_reason"] == {"type": "length", "length": 8}
    assert tokenizer.decode(limited["output_ids"]) == limited["text"]


def test_one_prompt_tells_all(tiny: Server, tokenizer: Tokenizer) -> None:
    body = {"text": "Once upon", "sampling_params": GREEDY, "rid": "mine"}
    response = tiny.post("/generate", body)
    assert response.headers["x-request-id"] == "mine"
    answer = response.json()
    assert set(answer) == {"text", "output_ids", "meta_info"}
    meta = answer["meta_info"]
    assert meta["id"] == "mine"
    assert meta["prompt_tokens"] == len(tokenizer.encode("Once upon", special=True))
    assert meta["completion_tokens"] == len(answer["output_ids"]) == 8
    assert meta["cached_tokens"] >= 0 and meta["e2e_latency"] > 0
    ids = tokenizer.encode("Once upon", special=True)
    same = _whole(tiny, {"input_ids": ids, "sampling_params": GREEDY})
    assert same["output_ids"] == answer["output_ids"]
    put = httpx.put(f"{tiny.url}/generate", json=body, timeout=60).json()
    assert put["output_ids"] == answer["output_ids"]
    assert _timeless(_chunks(tiny, body)[-1])["output_ids"] == answer["output_ids"]


@pytest.mark.parametrize("text", ["Once", ["Once", "Twice"]])
def test_a_call_ends_when_its_time_is_over(tiny: Server, text: str | list[str]) -> None:
    long = {"text": text, "sampling_params": GREEDY | {"max_new_tokens": 4000, "ignore_eos": True}}
    late = tiny.post("/generate", long | {"timeout": 0.01})
    assert late.status_code == 504 and late.json()["error"]["code"] == "timeout"
    assert until(lambda: not tiny.status()["requests"])
    assert tiny.post("/generate", long | {"timeout": 0}).status_code == 400
    short = {"text": text, "sampling_params": GREEDY, "timeout": 60}
    assert tiny.post("/generate", short).status_code == 200


def test_a_batch_is_a_list_and_its_chunks_have_an_index(tiny: Server) -> None:
    params = [GREEDY, GREEDY | {"max_new_tokens": 3}]
    body = {"text": ["Once", "Twice upon"], "sampling_params": params, "rid": ["a", "b"]}
    answers = _whole(tiny, body)
    assert [a["meta_info"]["id"] for a in answers] == ["a", "b"]
    assert [len(a["output_ids"]) for a in answers] == [8, 3]
    last = {c["index"]: c for c in _chunks(tiny, body)}
    for i, answer in enumerate(answers):
        assert _timeless(last[i]) == _timeless(answer)
    alone = [
        _whole(tiny, {"text": t, "sampling_params": p})["output_ids"]
        for t, p in zip(body["text"], params, strict=True)
    ]
    assert alone == [a["output_ids"] for a in answers]
    assert len(_whole(tiny, {"text": ["Once"], "sampling_params": GREEDY})) == 1
    many = _whole(tiny, {"input_ids": [[5, 6], [7]], "sampling_params": GREEDY, "rid": "both"})
    assert [a["meta_info"]["id"] for a in many] == ["both#0", "both#1"]
    assert [a["meta_info"]["prompt_tokens"] for a in many] == [2, 1]


def test_n_choices_from_one_prompt(tiny: Server) -> None:
    params = {"n": 3, "temperature": 1.0, "sampling_seed": 5, "max_new_tokens": 6}
    body = {"text": "Once", "sampling_params": params | {"ignore_eos": True}}
    answers = _whole(tiny, body)
    assert len({tuple(a["output_ids"]) for a in answers}) == 3
    assert _whole(tiny, body)[1]["output_ids"] == answers[1]["output_ids"], "the seed decides"
    last = {c["index"]: c["output_ids"] for c in _chunks(tiny, body)}
    assert [last[i] for i in range(3)] == [a["output_ids"] for a in answers]
    batch = _whole(tiny, body | {"text": ["Once", "Twice"]})
    assert [a["output_ids"] for a in batch[:3]] == [a["output_ids"] for a in answers]
    assert len(batch) == 6


def test_sampling_parameters_have_their_effect(tiny: Server) -> None:
    def ids(**params: Any) -> list[int]:
        body = {"text": "Once", "sampling_params": {"max_new_tokens": 12} | params}
        return list(_whole(tiny, body)["output_ids"])

    greedy = ids(temperature=0, ignore_eos=True)
    assert ids(top_k=1, temperature=1.0, ignore_eos=True) == greedy
    assert ids(min_p=1.0, temperature=1.0, ignore_eos=True) == greedy
    assert ids(top_p=1e-6, temperature=1.0, ignore_eos=True) == greedy
    banned = ids(temperature=0, ignore_eos=True, logit_bias={str(greedy[0]): -100})
    assert banned[0] != greedy[0]
    for name in ("frequency_penalty", "presence_penalty"):
        repeated = ids(temperature=0, ignore_eos=True, logit_bias={"77": 100})
        assert set(repeated) == {77}
        assert len(repeated) == 12
        assert len(set(ids(temperature=0, ignore_eos=True, **{name: 2.0}))) >= len(set(greedy))
    assert ids(temperature=0, repetition_penalty=50.0, ignore_eos=True) != greedy
    end = {"logit_bias": {"2": 100}, "temperature": 0}
    assert ids(**end) == [2]
    assert len(ids(**end, min_new_tokens=4)) >= 4
    assert ids(temperature=0, stop_token_ids=[greedy[0]], min_new_tokens=3)[0] != greedy[0]


def test_special_tokens_are_shown_on_demand(tiny: Server) -> None:
    params = {"temperature": 0, "max_new_tokens": 2, "ignore_eos": True, "logit_bias": {"1": 100}}
    assert _whole(tiny, {"text": "a", "sampling_params": params})["text"] == ""
    params["skip_special_tokens"] = False
    assert _whole(tiny, {"text": "a", "sampling_params": params})["text"] == "<|im_start|>" * 2


def test_the_default_is_128_tokens_and_null_is_what_the_window_leaves(tiny: Server) -> None:
    answer = _whole(tiny, {"text": "a", "sampling_params": {"ignore_eos": True}})
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 128}
    params = {"ignore_eos": True, "max_new_tokens": None}
    answer = _whole(tiny, {"input_ids": [5] * 8150, "sampling_params": params})
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 42}


def test_demanded_forms(tiny: Server) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["a"],
        "additionalProperties": False,
    }
    params = {"max_new_tokens": 100, "sampling_seed": 3}
    for given in (schema, json.dumps(schema)):
        body = {"text": "x", "sampling_params": params | {"json_schema": given}}
        jsonschema.validate(json.loads(_whole(tiny, body)["text"]), schema)
    body = {"text": "x", "sampling_params": params | {"regex": "[0-9]{3}-(yes|no)"}}
    assert _whole(tiny, body)["text"].endswith(("-yes", "-no"))
    grammar = 'root ::= "red" | "green"'
    body = {"text": "x", "sampling_params": params | {"ebnf": grammar}}
    assert _whole(tiny, body)["text"] in ("red", "green")
    assert _whole(tiny, body)["text"] == _chunks(tiny, body)[-1]["text"]
    both = params | {"regex": "a", "ebnf": grammar}
    assert (
        "only one"
        in _error(tiny.post("/generate", {"text": "x", "sampling_params": both}))["message"]
    )


def test_logprobs_of_answer_and_prompt(tiny: Server, tokenizer: Tokenizer) -> None:
    body = {
        "text": "Once upon a time",
        "sampling_params": GREEDY,
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 3,
        "return_text_in_logprobs": True,
    }
    answer = _whole(tiny, body)
    meta = answer["meta_info"]
    generated = meta["output_token_logprobs"]
    assert [i for _, i, _ in generated] == answer["output_ids"]
    assert "".join(text for _, _, text in generated) == answer["text"]
    assert [top[0][1] for top in meta["output_top_logprobs"]] == answer["output_ids"], "greedy"
    assert all(len(top) == 3 for top in meta["output_top_logprobs"])
    given = meta["input_token_logprobs"]
    prompt = tokenizer.encode("Once upon a time", special=True)
    assert [i for _, i, _ in given] == prompt
    assert given[0][0] is None and all(p < 0 for p, _, _ in given[1:])
    assert meta["input_top_logprobs"][0] is None
    assert _timeless(_chunks(tiny, body)[-1]) == _near(_timeless(answer))
    reference = tiny.post(
        "/v1/completions",
        {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 8, "logprobs": 3}
        | {"echo": True, "ignore_eos": True},
    ).json()["choices"][0]["logprobs"]["token_logprobs"]
    ours = [p for p, _, _ in given + generated]
    assert ours[1:] == pytest.approx(reference[1:], abs=1e-4)

    later = _whole(tiny, body | {"logprob_start_len": 2, "return_text_in_logprobs": False})
    reported = [t[:2] for t in later["meta_info"]["input_token_logprobs"]]
    assert reported == _near([g[:2] for g in given[2:]])
    assert {t[2] for t in later["meta_info"]["output_token_logprobs"]} == {None}
    plain = _whole(tiny, {"text": "Once", "sampling_params": GREEDY, "return_logprob": True})
    assert plain["meta_info"]["input_token_logprobs"] == []
    assert "output_top_logprobs" not in plain["meta_info"]
    each = body | {"text": ["Once", "Twice"], "return_logprob": [True, False]}
    first, second = _whole(tiny, each | {"logprob_start_len": [0, 0], "top_logprobs_num": [1, 0]})
    assert "output_token_logprobs" in first["meta_info"]
    assert "output_token_logprobs" not in second["meta_info"]


def test_a_stop_token_is_among_tokens_and_logprobs(tiny: Server) -> None:
    params = {"temperature": 0, "max_new_tokens": 8, "logit_bias": {"2": 100}}
    answer = _whole(tiny, {"text": "a", "sampling_params": params, "return_logprob": True})
    assert answer["output_ids"] == [2] and answer["text"] == ""
    assert [i for _, i, _ in answer["meta_info"]["output_token_logprobs"]] == [2]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": None}


def test_scoring_a_prompt_makes_nothing(tiny: Server) -> None:
    body = {
        "text": ["Once upon", "Once under"],
        "sampling_params": {"max_new_tokens": 0},
        "return_logprob": True,
        "logprob_start_len": 1,
    }
    answers = _whole(tiny, body)
    for answer in answers:
        assert (answer["text"], answer["output_ids"]) == ("", [])
        assert answer["meta_info"]["completion_tokens"] == 0
        assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
        assert len(answer["meta_info"]["input_token_logprobs"]) == 1
    last = {c["index"]: _timeless(c) for c in _chunks(tiny, body)}
    assert [last[0], last[1]] == [_near(_timeless(a)) for a in answers]


def test_aborting_is_an_end(tiny: Server) -> None:
    long = {"temperature": 0, "max_new_tokens": 6000, "ignore_eos": True}
    body = {"text": ["Once", "Twice"], "rid": ["stay", "go"]}
    body["sampling_params"] = [GREEDY, long]  # type: ignore[assignment]
    ended: list[Any] = []
    asking = threading.Thread(target=lambda: ended.extend(_whole(tiny, body)))
    asking.start()
    assert _abort(tiny, {"rid": "go"}) == 200
    asking.join(PATIENCE)
    assert ended[0]["meta_info"]["finish_reason"]["type"] == "length"
    assert ended[1]["meta_info"]["finish_reason"]["type"] == "abort"
    assert tiny.post("/abort_request", {"rid": "go"}).status_code == 404

    chunks: list[Any] = []
    streamed = {"text": "Once", "sampling_params": long, "rid": "flow"}
    asking = threading.Thread(target=lambda: chunks.extend(_chunks(tiny, streamed)))
    asking.start()
    assert _abort(tiny, {"rid": "flow"}) == 200
    asking.join(PATIENCE)
    assert [c["meta_info"]["finish_reason"] is not None for c in chunks].count(True) == 1
    assert chunks[-1]["meta_info"]["finish_reason"]["type"] == "abort"
    assert tiny.post("/abort_request", {"abort_all": True}).json() == {"aborted": 0}

    both = {"text": ["Once", "Twice"], "sampling_params": long, "rid": "both"}
    asking = threading.Thread(target=lambda: _whole(tiny, both))
    asking.start()
    assert until(lambda: len(tiny.status()["requests"]) == 2)
    named = tiny.post("/abort_request", {"rid": "both"})
    assert named.json() == {"rid": "both", "aborted": 2}
    asking.join(PATIENCE)
    _error(tiny.post("/abort_request", {}))


def _abort(server: Server, body: dict[str, Any]) -> int:
    def begun() -> bool:
        requests = server.status()["requests"]
        return any(r["made_tokens"] for r in requests if r["id"] == body["rid"])

    assert until(begun), "the request did not begin"
    return server.post("/abort_request", body).status_code


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "text"),
        ({"text": "a", "input_ids": [1]}, "text"),
        ({"text": []}, "text"),
        ({"text": ""}, "prompt"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": [1, [2]]}, "input_ids"),
        ({"input_ids": [10**9]}, "input_ids"),
        ({"input_ids": [-1]}, "input_ids[0]"),
        (
            {"text": "a", "sampling_params": {"max_new_tokens": -1}},
            "sampling_params.max_new_tokens",
        ),
        ({"text": "a", "sampling_params": {"max_new_tokens": 0}}, "sampling_params.max_new_tokens"),
        ({"text": "a", "sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
        ({"text": "a", "sampling_params": {"n": 0}}, "sampling_params.n"),
        ({"text": "a", "sampling_params": {"stop": [""]}}, "sampling_params.stop"),
        ({"text": "a", "sampling_params": {"stop": ["x"] * 65}}, "sampling_params.stop"),
        (
            {"text": "a", "sampling_params": {"min_new_tokens": 999}},
            "sampling_params.min_new_tokens",
        ),
        ({"text": "a", "sampling_params": {"stop_regex": "x"}}, "stop_regex"),
        ({"text": "a", "sampling_params": {"json_schema": "{"}}, "json_schema"),
        ({"text": "a", "sampling_params": [{}, {}]}, "sampling_params"),
        ({"text": ["a", "b"], "rid": ["x"]}, "rid"),
        ({"text": ["a", "b"], "rid": ["x", "x"]}, "rid"),
        ({"text": "a", "rid": "no spaces"}, "rid"),
        ({"text": "a", "return_logprob": True, "logprob_start_len": 99}, "logprob_start_len"),
        ({"text": "a", "image_data": "x.png"}, "image_data"),
        ({"text": "a", "lora_path": "x"}, "lora_path"),
        ({"text": "a", "return_hidden_states": True}, "return_hidden_states"),
        ({"text": "a", "token_ids_logprob": [1]}, "token_ids_logprob"),
    ],
)
def test_bad_input(tiny: Server, body: dict[str, Any], param: str) -> None:
    error = _error(tiny.post("/generate", body))
    assert error["param"] == param
    assert param.rpartition(".")[2].split("[")[0] in error["message"] or param in ("text", "prompt")


def test_more_bad_input(tiny: Server) -> None:
    error = _error(tiny.post("/generate", {"text": "a", "model": "nope"}), 404)
    assert "tiny" in error["message"]
    error = _error(tiny.post("/generate", {"input_ids": [5] * 9000}))
    assert error["code"] == "context_length_exceeded"
    assert "9000" in error["message"] and "8192" in error["message"]
    odd = {"text": "a", "sampling_params": GREEDY | {"glow": 1}, "shine": 2, "no_logs": True}
    response = tiny.post("/generate", odd)
    assert response.headers["x-millrace-ignored"] == "shine, sampling_params.glow"
