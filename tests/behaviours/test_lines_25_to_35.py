"""What every endpoint owes its users, lines 25 to 35 of the list of behaviours: test_NN is line NN.

Tools, structure and what each protocol adds.
Short and black-box; what a line means in depth is tested where its own feature is.
"""

from __future__ import annotations

import json

import httpx
import jsonschema
import pytest
from api.endpoint import Call, Endpoint
from api.endpoints import (
    CHAT,
    MESSAGES,
    OLLAMA,
    RESPONSES,
)

from behaviours.owed import (
    HELLO,
    JSON,
    LONG,
    LOOK,
    PONDERED,
    SCHEMA,
    SHORT,
    THOUGHT,
    Mill,
    both,
    every,
    every_talk,
    post,
    until,
)


@every_talk
def test_25_two_calls_in_one_answer(talker: httpx.Client, endpoint: Endpoint) -> None:
    said = both(talker, endpoint, "two calls", tools=[LOOK], temperature=0)
    arguments = ('{"at": "sky", "long": true}', '{"at": "sea"}')
    assert said.calls == tuple(Call("look", a) for a in arguments)
    assert said.finish == "calls"
    assert len(set(said.ids)) == 2 and all(said.ids)
    # Ollama's arguments are objects, which cannot come in pieces.
    assert endpoint is OLLAMA or len(said.spelled) > 4


@every_talk
def test_26_what_was_not_offered_is_no_call(talker: httpx.Client, endpoint: Endpoint) -> None:
    without = both(talker, endpoint, "two calls", temperature=0)
    assert without.calls == () and without.finish == "stop"
    assert '"at": "sky"' in without.text
    other = both(talker, endpoint, "not offered", tools=[LOOK], temperature=0)
    assert other.calls == () and other.finish == "stop"


@pytest.mark.parametrize("endpoint", [CHAT, MESSAGES, RESPONSES], ids=str)
def test_27_tool_choice_is_enforced(
    tiny: httpx.Client, talker: httpx.Client, endpoint: Endpoint
) -> None:
    none = both(talker, endpoint, "two calls", tools=[LOOK], tool_choice="none", temperature=0)
    assert none.calls == ()
    tools = [LOOK, LOOK | {"name": "listen"}]
    named = {"type": "function", "function": {"name": "listen"}}
    for choice in ("required", named):
        for seed in (1, 2):
            wishes = {"tools": tools, "tool_choice": choice, "seed": seed, "max_tokens": 300}
            said = both(tiny, endpoint, "hi", temperature=0.9, **wishes)
            assert said.calls and said.finish == "calls", "random weights, and yet a call"
            for call in said.calls:
                jsonschema.validate(json.loads(call.arguments), LOOK["parameters"])
            assert choice == "required" or {c.name for c in said.calls} == {"listen"}


@every_talk
def test_28_a_truncated_call_is_length_and_no_text(
    talker: httpx.Client, endpoint: Endpoint
) -> None:
    for limit in range(1, 40, 4):
        wishes = {"tools": [LOOK], "temperature": 0, "max_tokens": limit}
        said = both(talker, endpoint, "two calls", **wishes)
        assert (said.text, said.finish, said.generated) == ("", "length", limit)
        assert all(call.name == "look" for call in said.calls)


@every
def test_29_a_schema_is_kept_and_one_that_cannot_be_is_refused(
    tiny: httpx.Client, talker: httpx.Client, endpoint: Endpoint
) -> None:
    said = both(tiny, endpoint, "hi", schema=SCHEMA, temperature=0.9, seed=7, max_tokens=200)
    assert said.finish == "stop"
    jsonschema.validate(json.loads(said.text), SCHEMA)
    assert len([p for p in said.pieces if p]) > 1
    refused = post(tiny, endpoint, endpoint.body("hi", schema={"not": {}}))
    assert refused.status_code == 400
    assert "not" in endpoint.error(refused)
    if not endpoint.is_raw:
        wishes = {"schema": SCHEMA, "temperature": 0}
        thought = both(talker, endpoint, "as JSON", **wishes)
        assert (thought.thought, thought.text) == ("In a form.", JSON)
        called = both(talker, endpoint, "two calls", tools=[LOOK], **wishes)
        assert [c.name for c in called.calls] == ["look"] * 2
        form = both(talker, endpoint, "as JSON", tools=[LOOK], **wishes)
        assert (form.calls, form.text) == ((), JSON)


@every_talk
def test_30_thoughts_come_apart_are_switched_off_and_limited(
    talker: httpx.Client, endpoint: Endpoint
) -> None:
    said = both(talker, endpoint, "hi", temperature=0)
    assert (said.thought, said.text) == (THOUGHT, HELLO)
    assert said.thinking is None or 0 < said.thinking < said.generated
    off = both(talker, endpoint, "hi", temperature=0, enable_thinking=False)
    assert (off.thought, off.text) == ("", HELLO)
    if "thinking_budget" in endpoint.where:
        cut = both(talker, endpoint, "ponder", temperature=0, thinking_budget=10)
        assert cut.text == "Done."
        assert 0 < len(cut.thought.split()) <= 10
        assert PONDERED.startswith(cut.thought.strip())


def test_31_messages_are_anthropics(tiny: httpx.Client, talker: httpx.Client) -> None:
    body = MESSAGES.body("mixed", tools=[LOOK], temperature=0)
    reported = MESSAGES.stream(talker, body).raw
    kinds = [e["type"] for e in reported if e["type"] != "content_block_delta"]
    block = ["content_block_start", "content_block_stop"]
    assert kinds == ["message_start", *block * 3, "message_delta", "message_stop"]
    started = [e["content_block"]["type"] for e in reported if e["type"] == "content_block_start"]
    assert started == ["thinking", "text", "tool_use"]
    counted = talker.post("/v1/messages/count_tokens", json=body).json()["input_tokens"]
    for usage in (reported[0]["message"]["usage"], reported[-2]["usage"]):
        kinds = ["input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens"]
        assert sum(usage[k] for k in kinds) == counted
    stopped = MESSAGES.whole(talker, MESSAGES.body("Count", stop=["4, 5"]))
    assert (stopped.text, stopped.matched) == ("1, 2, 3, ", "4, 5")
    assert stopped.raw["stop_reason"] == "stop_sequence"
    one = [MESSAGES.whole(tiny, MESSAGES.body("hi", top_k=1, max_tokens=8)) for _ in range(2)]
    assert one[0] == one[1]
    blocks = [{"type": "text", "text": t} for t in ("Be brief.", "Be kind.")]
    prompts = [
        MESSAGES.whole(talker, MESSAGES.body("hi") | {"system": system}).prompt
        for system in ("Be brief.\nBe kind.", blocks)
    ]
    assert prompts[0] == prompts[1] > MESSAGES.whole(talker, MESSAGES.body("hi")).prompt


def test_32_responses_chain_are_kept_and_told_in_order(talker: httpx.Client) -> None:
    first = RESPONSES.whole(talker, RESPONSES.body("hi")).raw
    follow = RESPONSES.body("And now?") | {"previous_response_id": first["id"]}
    second = RESPONSES.stream(talker, follow)
    assert second.text == "Still here."
    assert second.prompt > RESPONSES.whole(talker, RESPONSES.body("And now?")).prompt
    unknown = talker.post(RESPONSES.path, json=follow | {"previous_response_id": "resp_none"})
    assert unknown.status_code == 400 and "resp_none" in RESPONSES.error(unknown)
    assert unknown.json()["error"]["code"] == "previous_response_not_found"
    assert talker.get(f"/v1/responses/{first['id']}").json()["output"] == first["output"]
    private = RESPONSES.whole(talker, RESPONSES.body("hi") | {"store": False}).raw
    assert talker.get(f"/v1/responses/{private['id']}").status_code == 404
    reported = RESPONSES.stream(talker, RESPONSES.body("mixed", tools=[LOOK])).raw
    assert [e["sequence_number"] for e in reported] == list(range(len(reported)))
    added = [e["item"]["type"] for e in reported if e["type"] == "response.output_item.added"]
    assert added == ["reasoning", "message", "function_call"]
    form = RESPONSES.whole(talker, RESPONSES.body("as JSON", schema=SCHEMA))
    assert json.loads(form.text) == json.loads(JSON)


@every
def test_33_the_status_names_every_request(mill: Mill, endpoint: Endpoint) -> None:
    body = endpoint.body("mill " * 50, cache_salt="33", **LONG)
    endpoint.whole(mill.client, endpoint.body("mill " * 50, cache_salt="33", **SHORT))
    headers = {"x-request-id": f"seen-{endpoint}"}
    with endpoint.open(mill.client, body, headers=headers):
        assert until(lambda: mill.only()["made_tokens"] > 5)
        request = mill.only()
    assert mill.idle()
    assert request["id"] == f"seen-{endpoint}"
    assert (request["phase"], request["progress"]) == ("decode", 1.0)
    assert request["prompt_tokens"] - request["cached_tokens"] == 1
    assert request["cache_hit"] == "exact"
    assert request["ttft_seconds"] > 0 and request["tokens_per_second"] > 0
    assert request["endpoint"] == endpoint.path
    counted = mill.client.get("/metrics")
    assert counted.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert f'millrace_requests_total{{endpoint="{endpoint.path}"' in counted.text
