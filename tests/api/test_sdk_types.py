"""Every endpoint and stream of OpenAI's and Anthropic's protocols, held to the SDKs' own types.

What is ours beyond them is in docs/api.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic.types as claude
import pytest
import scripted
from api.endpoint import frames
from api.strict import problems
from behaviours.owed import LOOK
from conftest import Server
from openai.types import Completion, Model, responses
from openai.types import chat as openai_chat
from openai.types import conversations as openai_conversations
from scripted import Rule, call, think

RULES = [
    Rule("ponder and look", think("I must look.", "Now.\n" + call("look", at="sky"))),
    Rule("edit", call("edit", input="a line")),
    Rule("ponder", think("Well, well.", "Done.")),
    Rule("look", call("look", at="sky")),
    Rule("", "Hello there, friend."),
]
OURS = {"matched_stop", "reasoning_content", "prompt_logprobs", "store"}
"""Fields of answers that the SDKs' types do not know."""
CARD = {"context_window", "max_model_len", "alias_of", "state", "pinned", "memory"}
CARD |= {"input_modalities", "output_modalities", "default_sampling_params"}
TOOL = {"type": "function", "function": LOOK}
FLAT = {"type": "function", **LOOK}
CUSTOM = {"type": "custom", "name": "edit", "description": "Edits."}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, default_model: Path) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("sdk")
    generated = scripted.make(folder / "scripted", default_model, RULES, "thinking")
    arguments = (str(generated), "--trust-remote-code", "--store", str(folder / "kept.sqlite"))
    running = Server(*arguments, "--alias", "other").wait_ready()
    yield running
    running.stop()


def _whole(model: Server, path: str, body: dict[str, Any], **headers: str) -> Any:
    response = model.post(path, body, headers=headers)
    assert response.status_code == 200, response.text
    return response.json()


def _events(model: Server, path: str, body: dict[str, Any]) -> list[Any]:
    with model.http.stream("POST", path, json=body | {"stream": True}) as response:
        found = [f.data for f in frames(response.iter_lines())]
    assert len(found) > 2
    return [event for event in found if event != "[DONE]"]


def _user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


CHATS: list[dict[str, Any]] = [
    {"messages": _user("hi"), "logprobs": True, "top_logprobs": 2},
    {"messages": _user("hi"), "n": 2, "stop": ["friend"]},
    {"messages": _user("ponder and look"), "tools": [TOOL]},
    {"messages": _user("look"), "functions": [LOOK]},
    {"messages": _user("hi"), "max_tokens": 2, "stream_options": {"include_usage": True}},
]


@pytest.mark.parametrize("body", CHATS)
def test_chat(model: Server, body: dict[str, Any]) -> None:
    path = "/v1/chat/completions"
    alone = {k: v for k, v in body.items() if k != "stream_options"}
    assert problems(_whole(model, path, alone), openai_chat.ChatCompletion, beyond=OURS) == []
    for chunk in _events(model, path, body):
        assert problems(chunk, openai_chat.ChatCompletionChunk, beyond=OURS) == []


def test_a_custom_call_in_chat(model: Server) -> None:
    """Whole only: the SDK's chunks know no custom calls, although the protocol has them."""
    custom = {"type": "custom", "custom": {"name": "edit"}}
    body = {"messages": _user("edit"), "tools": [custom]}
    answer = _whole(model, "/v1/chat/completions", body)
    assert answer["choices"][0]["message"]["tool_calls"][0]["type"] == "custom"
    assert problems(answer, openai_chat.ChatCompletion, beyond=OURS) == []


@pytest.mark.parametrize(
    "more", [{}, {"logprobs": 2}, {"n": 2, "stop": "friend"}, {"max_tokens": 0, "echo": True}]
)
def test_completions(model: Server, more: dict[str, Any]) -> None:
    body = {"prompt": "One two", "max_tokens": 6} | more
    answer = _whole(model, "/v1/completions", body)
    assert problems(answer, Completion, beyond=OURS) == []
    for chunk in _events(model, "/v1/completions", body):
        for choice in chunk["choices"]:
            # The types have no null here, which is what every server sends until the end.
            choice["finish_reason"] = choice["finish_reason"] or "stop"
        assert problems(chunk, Completion, beyond=OURS) == []


RESPONSES: list[dict[str, Any]] = [
    {"input": "hi", "top_logprobs": 2, "include": ["message.output_text.logprobs"]},
    {"input": "ponder", "include": ["reasoning.encrypted_content"]},
    {"input": "ponder and look", "tools": [FLAT], "reasoning": {"summary": "auto"}},
    {"input": "edit", "tools": [CUSTOM], "store": False},
    {"input": "hi", "max_output_tokens": 2, "metadata": {"a": "b"}, "stop": ["x"]},
    {
        "input": "look",
        "tools": [{"type": "namespace", "name": "eyes", "description": "Eyes.", "tools": [FLAT]}],
        "tool_choice": "required",
        "instructions": "Be brief.",
    },
]


@pytest.mark.parametrize("body", RESPONSES)
def test_responses(model: Server, body: dict[str, Any]) -> None:
    whole = _whole(model, "/v1/responses", body)
    assert problems(whole, responses.Response, beyond=OURS) == []
    for event in _events(model, "/v1/responses", body):
        assert problems(event, responses.ResponseStreamEvent, beyond=OURS) == []
    if body.get("store") is not False:
        kept = model.http.get(f"/v1/responses/{whole['id']}").json()
        assert problems(kept, responses.Response, beyond=OURS) == []
        listed = model.http.get(f"/v1/responses/{whole['id']}/input_items").json()
        assert problems(listed, responses.ResponseItemList) == []


def test_what_surrounds_responses(model: Server) -> None:
    counted = _whole(model, "/v1/responses/input_tokens", {"input": "hi"})
    assert problems(counted, responses.InputTokenCountResponse) == []
    background = {"input": "hi", "background": True}
    queued = _whole(model, "/v1/responses", background)
    assert problems(queued, responses.Response, beyond=OURS) == []
    for event in _events(model, "/v1/responses", background):
        assert problems(event, responses.ResponseStreamEvent, beyond=OURS) == []
    short = _whole(model, "/v1/responses/compact", {"input": "hi"})
    told = [p for p in problems(short, responses.CompactedResponse) if "output[0]" not in p]
    assert told == [], "the user's messages, of which the types say nothing, aside"
    assert short["output"][0]["role"] == "user" and short["output"][-1]["type"] == "compaction"


def test_conversations(model: Server) -> None:
    items = [{"type": "message", "role": "user", "content": "hi"}]
    made = _whole(model, "/v1/conversations", {"items": items, "metadata": {"a": "b"}})
    assert problems(made, openai_conversations.Conversation) == []
    _whole(model, "/v1/responses", {"input": "ponder", "conversation": made["id"]})
    listed = model.http.get(f"/v1/conversations/{made['id']}/items").json()
    assert len(listed["data"]) == 4
    assert problems(listed, openai_conversations.ConversationItemList) == []
    gone = model.http.delete(f"/v1/conversations/{made['id']}").json()
    assert problems(gone, openai_conversations.ConversationDeletedResource) == []


def test_models(model: Server) -> None:
    listed = model.http.get("/v1/models").json()
    assert set(listed) == {"object", "data"} and len(listed["data"]) == 2
    for card in listed["data"]:
        assert problems(card, Model, beyond=CARD) == []
    theirs = {"anthropic-version": "2023-06-01"}
    page = model.http.get("/v1/models", headers=theirs).json()
    assert set(page) == {"data", "first_id", "last_id", "has_more"}
    alone = model.http.get("/v1/models/other", headers=theirs).json()
    for card in [*page["data"], alone]:
        assert problems(card, claude.ModelInfo) == []


MESSAGES: list[dict[str, Any]] = [
    {"messages": _user("hi"), "stop_sequences": ["friend"]},
    {"messages": _user("ponder and look"), "tools": [{"name": "look", "input_schema": {}}]},
    {"messages": _user("ponder"), "thinking": {"type": "adaptive", "display": "omitted"}},
    {"messages": _user("look"), "tools": [{"name": "look", "input_schema": {}}], "max_tokens": 8},
]


@pytest.mark.parametrize("body", MESSAGES)
def test_messages(model: Server, body: dict[str, Any]) -> None:
    body = {"max_tokens": 100} | body
    assert problems(_whole(model, "/v1/messages", body), claude.Message) == []
    for event in _events(model, "/v1/messages", body):
        if event["type"] != "ping":
            assert problems(event, claude.RawMessageStreamEvent) == []
    counting = {k: v for k, v in body.items() if k in ("messages", "tools", "thinking")}
    counted = _whole(model, "/v1/messages/count_tokens", counting)
    assert problems(counted, claude.MessageTokensCount) == []


def test_the_check_finds_what_is_wrong() -> None:
    card = {"id": "a", "object": "model", "created": 1, "owned_by": "b"}
    assert problems(card, Model) == []
    assert problems(card | {"x": 1}, Model) == ["$.x is not known to Model"]
    assert problems({k: v for k, v in card.items() if k != "id"}, Model)
    assert problems(card | {"created": "1"}, Model)
