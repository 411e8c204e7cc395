"""Responses with the real openai SDK on a tiny model: whole, streamed, parsed, stored, refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pydantic
import pytest
from api import tiny_folder
from api.responses_wire import SHORT, check_order, client_of, create, plain, serve, stream
from conftest import Server


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, default_model: Path) -> Iterator[Server]:
    yield from serve(tmp_path_factory.mktemp("responses"), default_model)


@pytest.fixture(scope="module")
def client(tiny: Server) -> openai.OpenAI:
    return client_of(tiny)


def test_create_has_all_that_the_sdk_knows(tiny: Server, client: openai.OpenAI) -> None:
    generated = client.responses.create(
        input="Hello",
        instructions="Be brief.",
        metadata={"topic": "demo"},
        user="me",
        service_tier="flex",
        prompt_cache_key="k",
        safety_identifier="s",
        max_tool_calls=3,
        **SHORT,
    )
    assert generated.id.startswith("resp_") and generated.object == "response"
    assert generated.status == "incomplete"
    assert (
        generated.incomplete_details and generated.incomplete_details.reason == "max_output_tokens"
    )
    assert generated.output[0].id and generated.output[0].id.startswith("msg_")
    assert generated.usage and generated.usage.output_tokens == 8
    assert generated.usage.total_tokens == generated.usage.input_tokens + 8
    assert (generated.instructions, generated.metadata, generated.user) == (
        "Be brief.",
        {"topic": "demo"},
        "me",
    )
    again = client.responses.retrieve(generated.id)
    assert again.output_text == generated.output_text and again.usage == generated.usage


def test_behaviour_9_streamed_equals_whole(tiny: Server) -> None:
    body = SHORT | {"input": "Tell me more.", "max_output_tokens": 24}
    whole = create(tiny, **body)
    assert plain(check_order(stream(tiny, **body))) == plain(whole)


def test_the_sdks_stream_helper(client: openai.OpenAI) -> None:
    text = ""
    with client.responses.stream(
        input="Hi", extra_body={"stop_token_ids": [198]}, **SHORT
    ) as streamed:
        for event in streamed:
            if event.type == "response.output_text.delta":
                text += event.delta
        final = streamed.get_final_response()
    assert final.status == "completed" and final.output_text == text


class Weather(pydantic.BaseModel):
    sky: Literal["blue", "grey"]
    warm: bool


def test_behaviour_32_text_format_json_schema(client: openai.OpenAI) -> None:
    generated = client.responses.parse(
        model="tiny", input="Weather?", text_format=Weather, max_output_tokens=60
    )
    assert isinstance(generated.output_parsed, Weather)
    with client.responses.stream(
        model="tiny", input="Weather?", text_format=Weather, max_output_tokens=60
    ) as streamed:
        assert isinstance(streamed.get_final_response().output_parsed, Weather)
    loose = client.responses.create(
        model="tiny", input="x", text={"format": {"type": "json_object"}}, max_output_tokens=5
    )
    assert loose.output_text.lstrip().startswith("{")


def test_behaviour_32_previous_response_id_chains(client: openai.OpenAI) -> None:
    first = client.responses.create(input="One.", instructions="Long rules. " * 20, **SHORT)
    second = client.responses.create(input="Two.", previous_response_id=first.id, **SHORT)
    assert second.previous_response_id == first.id
    by_hand = client.responses.create(
        input=[
            {"role": "user", "content": "One."},
            {"role": "assistant", "content": first.output_text},
            {"role": "user", "content": "Two."},
        ],
        **SHORT,
    )
    assert second.usage and by_hand.usage
    assert second.usage.input_tokens == by_hand.usage.input_tokens, "no instructions carried over"
    assert second.output_text == by_hand.output_text


def test_behaviour_32_an_unknown_id_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="resp_none") as unknown:
        client.responses.create(input="x", previous_response_id="resp_none", **SHORT)
    assert unknown.value.code == "previous_response_not_found"
    assert unknown.value.param == "previous_response_id"
    for call in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError, match="resp_none"):
            call("resp_none")
    with pytest.raises(openai.NotFoundError):
        client.responses.input_items.list("resp_none")
    with pytest.raises(openai.NotFoundError, match="conv_none"):
        client.responses.create(input="x", conversation="conv_none", **SHORT)


def test_input_items_come_in_pages(client: openai.OpenAI) -> None:
    first = client.responses.create(
        input=[{"role": "user", "content": f"{n}"} for n in range(5)], **SHORT
    )
    texts = [
        i.content[0].text  # type: ignore[union-attr]
        for i in client.responses.input_items.list(first.id, limit=2, order="asc")
    ]
    assert texts == ["0", "1", "2", "3", "4"]
    newest = client.responses.input_items.list(first.id, limit=2)
    assert [i.content[0].text for i in newest.data] == ["4", "3"]  # type: ignore[union-attr]
    assert newest.has_more
    second = client.responses.create(input="next", previous_response_id=first.id, **SHORT)
    assert len(list(client.responses.input_items.list(second.id))) == 7
    with pytest.raises(openai.BadRequestError, match="limit"):
        client.responses.input_items.list(first.id, limit=0)


def test_delete_is_for_good(client: openai.OpenAI) -> None:
    generated = client.responses.create(input="Forget me.", **SHORT)
    client.responses.delete(generated.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(generated.id)
    with pytest.raises(openai.BadRequestError, match=generated.id):
        client.responses.create(input="x", previous_response_id=generated.id, **SHORT)


def test_conversations(client: openai.OpenAI) -> None:
    talk = client.conversations.create(
        items=[{"role": "user", "content": "My name is Ada."}], metadata={"a": "b"}
    )
    generated = client.responses.create(input="Who am I?", conversation=talk.id, **SHORT)
    assert generated.conversation and generated.conversation.id == talk.id
    listed = list(client.conversations.items.list(talk.id, order="asc"))
    assert [getattr(i, "role", "") for i in listed] == ["user", "user", "assistant"]
    assert listed[-1].id == generated.output[0].id
    by_hand = client.responses.create(
        input=[
            {"role": "user", "content": "My name is Ada."},
            {"role": "user", "content": "Who am I?"},
        ],
        **SHORT,
    )
    assert by_hand.usage and generated.usage
    assert by_hand.usage.input_tokens == generated.usage.input_tokens
    added = client.conversations.items.create(talk.id, items=[{"role": "user", "content": "x"}])
    assert client.conversations.items.retrieve(added.data[0].id, conversation_id=talk.id)  # type: ignore[arg-type]
    client.conversations.items.delete(added.data[0].id, conversation_id=talk.id)  # type: ignore[arg-type]
    reported: Any = client.responses.create(
        input="And?", conversation={"id": talk.id}, stream=True, **SHORT
    )
    assert [event.type for event in reported][-1] == "response.incomplete"
    assert len(list(client.conversations.items.list(talk.id, limit=2))) == 5
    assert client.conversations.update(talk.id, metadata={"c": "d"}).metadata == {"c": "d"}
    assert client.conversations.retrieve(talk.id).metadata == {"c": "d"}
    with pytest.raises(openai.BadRequestError, match="not both"):
        client.responses.create(
            input="x", conversation=talk.id, previous_response_id=generated.id, **SHORT
        )
    private = client.responses.create(input="x", conversation=talk.id, store=False, **SHORT)
    assert len(list(client.conversations.items.list(talk.id))) == 7, "a conversation goes on"
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(private.id)
    assert client.conversations.delete(talk.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.conversations.retrieve(talk.id)


def test_item_references_stand_for_stored_items(client: openai.OpenAI) -> None:
    generated = client.responses.create(input="One.", **SHORT)
    items: Any = [
        {"type": "item_reference", "id": generated.output[0].id},
        {"role": "user", "content": "?"},
    ]
    named = client.responses.create(input=items, **SHORT)
    items[0] = {"role": "assistant", "content": generated.output_text}
    reported = client.responses.create(input=items, **SHORT)
    assert (
        named.usage and reported.usage and named.usage.input_tokens == reported.usage.input_tokens
    )
    with pytest.raises(openai.NotFoundError, match="msg_none"):
        client.responses.create(input=[{"type": "item_reference", "id": "msg_none"}], **SHORT)


def test_input_tokens_are_counted_as_they_will_be(client: openai.OpenAI) -> None:
    body: Any = {
        "model": "tiny",
        "input": "How long is this?",
        "instructions": "Answer.",
        "tools": [{"type": "function", "name": "look", "parameters": {"type": "object"}}],
    }
    generated = client.responses.create(max_output_tokens=1, **body)
    count = client.responses.input_tokens.count(**body)
    assert generated.usage and count.input_tokens == generated.usage.input_tokens


def test_logprobs_are_those_of_the_text(tiny: Server) -> None:
    asked = SHORT | {
        "input": "x",
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 2,
    }
    whole = create(tiny, **asked)
    scores = whole["output"][0]["content"][0]["logprobs"]
    assert len(scores) == whole["usage"]["output_tokens"]
    assert all(len(s["top_logprobs"]) == 2 and s["logprob"] <= 0 for s in scores)
    text = "".join(s["token"] for s in scores)
    assert text == whole["output"][0]["content"][0]["text"]
    reported = [s for e in stream(tiny, **asked) for s in e.get("logprobs", []) if "delta" in e]
    assert [(s["token"], s["logprob"]) for s in reported] == [
        (s["token"], s["logprob"]) for s in scores
    ]


def test_sampling_extras_are_honoured(tiny: Server) -> None:
    asked = {"model": "tiny", "input": "x", "max_output_tokens": 12, "temperature": 1.0}
    one = create(tiny, **asked, seed=7)
    assert plain(one) == plain(create(tiny, **asked, seed=7))
    assert plain(one) != plain(create(tiny, **asked, seed=8))
    greedy = [create(tiny, **asked, top_k=1) for _ in range(2)]
    assert plain(greedy[0]) == plain(greedy[1])


def test_truncation_auto_drops_the_oldest_and_disabled_refuses(tiny: Server) -> None:
    turns = [{"role": "user", "content": f"{n} " + "word " * 400} for n in range(30)]
    body = SHORT | {"input": turns, "instructions": "Keep this."}
    refused = tiny.post("/v1/responses", body)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "input")
    assert str(tiny_folder.WINDOW) in error["message"]
    generated = create(tiny, **body, truncation="auto")
    assert tiny_folder.WINDOW // 2 < generated["usage"]["input_tokens"] <= tiny_folder.WINDOW - 8
    alone = create(tiny, **SHORT | {"input": turns[-1:], "instructions": "Keep this."})
    assert generated["usage"]["input_tokens"] > alone["usage"]["input_tokens"]
    huge = SHORT | {"input": "word " * 9000, "truncation": "auto"}
    assert tiny.post("/v1/responses", huge).json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("body", "status", "word"),
    [
        ({"input": "x", "max_output_tokens": 0}, 400, "max_output_tokens"),
        ({"input": "x", "model": "nope"}, 404, "tiny"),
        ({"input": ""}, 400, "input"),
        ({"input": "x", "n": 2}, 400, "'n'"),
        ({"input": "x", "prompt": {"id": "pmpt_1"}}, 400, "'prompt'"),
        ({"input": "x", "stop": [""]}, 400, "stop"),
        ({"input": "x", "include": ["everything"]}, 400, "include"),
        ({"input": "x", "text": {"format": {"type": "poem"}}}, 400, "text.format"),
        ({"input": "x", "tool_choice": "required"}, 400, "no function"),
        ({"input": "x", "background": True, "store": False}, 400, "store"),
        ({"input": "x", "temperature": "hot"}, 400, "temperature"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            400,
            "a picture needs",
        ),
    ],
)
def test_behaviour_5_errors_have_openais_shape(
    tiny: Server, body: dict[str, Any], status: int, word: str
) -> None:
    answer = tiny.post("/v1/responses", body)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert word in error["message"]


def test_what_is_left_out_is_named(tiny: Server) -> None:
    body = SHORT | {
        "input": "x",
        "tools": [{"type": "web_search"}, {"type": "file_search", "vector_store_ids": ["v"]}],
        "text": {"verbosity": "low"},
        "reasoning": {"effort": "high"},
        "client_metadata": {"a": "b"},
        "made_up": 1,
    }
    answer = tiny.post("/v1/responses", body, headers={"x-request-id": "my-request"})
    assert answer.status_code == 200
    assert answer.headers["x-request-id"] == "my-request"
    assert answer.json()["id"].startswith("resp_")
    assert answer.headers["x-millrace-ignored"].split(", ") == [
        "tools.web_search",
        "tools.file_search",
        "reasoning.effort",
        "text.verbosity",
        "made_up",
    ]
