"""What every endpoint owes its users, lines 13 to 24 of the list of behaviours: test_NN is line NN.

Sampling, the cache and sharing.
Short and black-box; what a line means in depth is tested where its own feature is.
"""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from api.endpoint import Endpoint
from api.endpoints import (
    ALL,
    CHAT,
    COMPLETIONS,
    GENERATE,
    OLLAMA,
    RESPONSES,
    TALKS,
)
from conftest import held

from behaviours.owed import (
    CHUNK,
    ENDS,
    LONG,
    LOOK,
    RUNNING,
    SHORT,
    Mill,
    both,
    every,
    every_talk,
    until,
)


@every
def test_13_each_request_has_its_own_sampling(tiny: httpx.Client, endpoint: Endpoint) -> None:
    greedy = endpoint.whole(tiny, endpoint.body("hi", max_tokens=12, temperature=0)).text
    asked = [{"temperature": t, "seed": s, "max_tokens": 12} for t in (0.7, 1) for s in (1, 2)]
    asked += [{"temperature": 1, "top_k": 1, "max_tokens": 12}]
    bodies = [endpoint.body("hi", **wishes) for wishes in asked]
    if "logit_bias" in endpoint.where:
        bodies.append(endpoint.body("hi", logit_bias={"77": 100}, max_tokens=12, temperature=1))
    alone = [endpoint.whole(tiny, body).text for body in bodies]
    with ThreadPoolExecutor(RUNNING) as pool:
        together = list(pool.map(lambda body: endpoint.whole(tiny, body).text, bodies))
    assert together == alone
    assert alone[4] == greedy
    assert len(set(alone)) == len(alone)


@every
def test_14_the_cap_is_told_as_length(tiny: httpx.Client, endpoint: Endpoint) -> None:
    for limit in (1, 7):
        said = both(tiny, endpoint, "hi", max_tokens=limit, temperature=0)
        assert (said.finish, said.generated) == ("length", limit)


def test_15_logprobs_are_those_of_a_forward_pass(mill: Mill, tmp_path: Path) -> None:
    ids = mill.client.post("/tokenize", json={"prompt": "Once upon a time"}).json()["tokens"]
    body = {"input_ids": ids, "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}
    params = {"sampling_params": {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True}}
    meta = mill.client.post("/generate", json=body | params).json()["meta_info"]
    reported = meta["input_token_logprobs"] + meta["output_token_logprobs"]
    tokens, scores = [t for _, t, _ in reported], [p for p, _, _ in reported]
    script, out = Path(__file__).parents[1] / "plain_forward.py", tmp_path / "tables.npz"
    command = [sys.executable, str(script), str(mill.model), str(out)]
    subprocess.run(command, input=json.dumps([tokens]), text=True, check=True)
    with np.load(out) as tables:
        table = tables["arr_0"]
    expected = [float(table[i][token]) for i, token in enumerate(tokens[1:])]
    assert scores[1:] == pytest.approx(expected, abs=1e-4)
    echo = {"prompt": ids, "echo": True, "logprobs": 2, "max_tokens": 6, "ignore_eos": True}
    choice = mill.client.post("/v1/completions", json=echo | {"temperature": 0}).json()["choices"]
    assert choice[0]["text"].startswith("Once upon a time")
    assert choice[0]["logprobs"]["token_logprobs"][1:] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("endpoint", [CHAT, COMPLETIONS, GENERATE], ids=str)
def test_15_several_choices_come_from_one_prefill(mill: Mill, endpoint: Endpoint) -> None:
    before = mill.prefilled
    wishes = {"n": 4, "temperature": 1, "seed": 5, "max_tokens": 8}
    wishes["cache_salt"] = f"15 {endpoint}"
    reported = mill.client.post(endpoint.path, json=endpoint.body("mill " * 200, **wishes)).json()
    choices = reported if isinstance(reported, list) else reported["choices"]
    assert len({str(c.get("message") or c["text"]) for c in choices}) == 4
    prompt = choices[0]["meta_info"] if endpoint is GENERATE else reported["usage"]
    assert mill.prefilled - before == prompt["prompt_tokens"]


@pytest.mark.parametrize("source", ENDS)
def test_16_every_end_of_sequence_ends(tiny: httpx.Client, source: str) -> None:
    for endpoint in ALL:
        if "logit_bias" in endpoint.where:
            bias = {str(ENDS[source]): 100}
            said = endpoint.whole(tiny, endpoint.body("hi", logit_bias=bias, **SHORT))
            assert (said.text, said.finish, said.generated) == ("", "stop", 1), endpoint


@every
def test_17_the_same_prompt_again_runs_its_last_token_only(mill: Mill, endpoint: Endpoint) -> None:
    body = endpoint.body("mill " * 100, cache_salt=f"17 {endpoint}", **SHORT)
    first = endpoint.whole(mill.client, body)
    before = mill.prefilled
    assert endpoint.whole(mill.client, body) == first
    assert mill.prefilled - before == 1


@every_talk
def test_18_the_next_turn_runs_what_is_new(mill: Mill, endpoint: Endpoint) -> None:
    wishes: dict[str, Any] = SHORT | {"cache_salt": f"18 {endpoint}"}
    body = endpoint.body("mill " * 100, **wishes)
    first = endpoint.whole(mill.client, body)
    again = {"role": "user", "content": "And now?"}
    if endpoint is RESPONSES:
        body = endpoint.body("And now?", **wishes) | {"previous_response_id": first.raw["id"]}
    else:
        body[endpoint.history] += [*first.turn, again]
    before = mill.prefilled
    second = endpoint.whole(mill.client, body)
    assert second.prompt > first.prompt
    assert mill.prefilled - before <= second.prompt - first.prompt + 1


@pytest.mark.parametrize("endpoint", [e for e in ALL if e is not OLLAMA], ids=str)
def test_19_what_is_told_as_cached_was_reused(mill: Mill, endpoint: Endpoint) -> None:
    for words in (60, 60, 90):
        before = mill.prefilled
        body = endpoint.body("mill " * words, cache_salt=f"19 {endpoint}", **SHORT)
        said = (
            endpoint.stream(mill.client, body) if words > 60 else endpoint.whole(mill.client, body)
        )
        assert said.cached == said.prompt - (mill.prefilled - before)
    assert said.cached and 60 <= said.cached < 90


def test_21_a_retry_goes_on_where_the_prefill_stopped(mill: Mill) -> None:
    body = COMPLETIONS.body("mill " * 7000, cache_salt="21", max_tokens=1)
    before = mill.prefilled
    with COMPLETIONS.open(mill.client, body):
        assert until(lambda: mill.prefilled - before > 3500)
    assert mill.idle()
    before = mill.prefilled
    said = COMPLETIONS.whole(mill.client, body)
    assert mill.prefilled - before <= 0.6 * said.prompt


@every
@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
def test_22_a_disconnect_frees_the_slot(mill: Mill, endpoint: Endpoint, stream: bool) -> None:
    before = mill.generated
    client = mill.send(endpoint.path, endpoint.body("hi", **LONG) | {"stream": stream})
    assert until(lambda: mill.generated > before)
    with held(mill.engine):
        client.close()
        assert mill.idle()
    assert 0 < mill.generated - before < LONG["max_tokens"] / 2


@every
def test_22_a_request_is_cancelled_by_its_id(mill: Mill, endpoint: Endpoint) -> None:
    headers = {"x-request-id": f"mine-{endpoint}"}
    body = endpoint.body("hi", **LONG) | {"stream": False}
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(mill.client.post, endpoint.path, json=body, headers=headers)
        assert mill.only()["id"] == f"mine-{endpoint}"
        assert mill.client.delete(f"/v1/requests/mine-{endpoint}").status_code == 200
        response = asking.result()
    if endpoint is GENERATE:
        assert response.json()["meta_info"]["finish_reason"]["type"] == "abort"
    else:
        assert response.status_code == 499 and endpoint.error(response)
    assert mill.client.delete(f"/v1/requests/mine-{endpoint}").status_code == 404


def test_23_a_long_prefill_does_not_stall_other_streams(mill: Mill) -> None:
    """A token of theirs comes with every chunk of it."""
    with (
        COMPLETIONS.open(mill.client, COMPLETIONS.body("Once", ignore_eos=True, **LONG)) as stream,
        ThreadPoolExecutor(1) as pool,
    ):
        reading = pool.submit(lambda: [None for _ in stream.iter_lines()])
        assert until(lambda: mill.only()["made_tokens"] > 5)
        before = mill.generated
        long = GENERATE.body("mill " * 5000, cache_salt="23", **SHORT | {"max_tokens": 1})
        said = GENERATE.whole(mill.client, long)
        came = mill.generated - before
        assert not reading.done(), "it ran beside the prompt"
        mill.client.delete(f"/v1/requests/{mill.only()['id']}")
    assert mill.idle()
    assert came >= 0.8 * said.prompt / CHUNK


def test_24_interleaved_streams_share_nothing(talker: httpx.Client) -> None:
    says = ("mixed", "two calls", "ponder", "hi")
    asked = [(e, e.body(say, tools=[LOOK], temperature=0)) for say in says for e in TALKS]
    alone = [endpoint.whole(talker, body) for endpoint, body in asked]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda pair: pair[0].stream(talker, pair[1]), asked))
    assert together == alone
