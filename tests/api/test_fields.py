"""Fields that change the answer, under every name that servers have for them: honoured or refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import scripted
from api.endpoint import Endpoint
from api.endpoints import ALL, CHAT, COMPLETIONS, MESSAGES, OLLAMA, RESPONSES, TALKS, turn
from behaviours.owed import LOOK
from conftest import Server
from scripted import Rule, call, think

COUNTED = "1, 2, 3, 4, 5, 6"
RULES = [
    Rule("ponder", think("Well, well.", "Done.")),
    Rule("look", call("look", at="sky")),
    Rule("Count", COUNTED),
]
GBNF = 'root ::= "four" | "five"'
NUMBER = {
    "type": "object",
    "properties": {"n": {"type": "boolean"}},
    "required": ["n"],
    "additionalProperties": False,
}
SHORT = {"max_tokens": 40, "temperature": 0}

every = pytest.mark.parametrize("endpoint", ALL, ids=str)
every_talk = pytest.mark.parametrize("endpoint", TALKS, ids=str)
formed = pytest.mark.parametrize("endpoint", [CHAT, COMPLETIONS, MESSAGES, RESPONSES], ids=str)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, default_model: Path) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("fields") / "scripted"
    generated = scripted.make(folder, default_model, RULES, "thinking")
    running = Server(str(generated), "--trust-remote-code", "--store", "none").wait_ready()
    yield running
    running.stop()


def _said(model: Server, endpoint: Endpoint, say: str, **fields: Any) -> str:
    body = endpoint.body(turn(endpoint, say), **SHORT) | fields
    whole = endpoint.whole(model.http, body)
    assert endpoint.stream(model.http, body) == whole
    return whole.text


def _refused(model: Server, endpoint: Endpoint, **fields: Any) -> str:
    body = endpoint.body(turn(endpoint, "Count"), **SHORT) | fields
    response = model.post(endpoint.path, body | {"stream": False})
    assert response.status_code == 400, response.text
    return endpoint.error(response)


@formed
@pytest.mark.parametrize(
    ("field", "allowed"),
    [
        ({"structured_outputs": {"choice": ["four", "five"]}}, {"four", "five"}),
        ({"structured_outputs": {"regex": "four|five"}}, {"four", "five"}),
        ({"structured_outputs": {"grammar": GBNF}}, {"four", "five"}),
        ({"regex": "four|five"}, {"four", "five"}),
        ({"ebnf": GBNF}, {"four", "five"}),
        ({"grammar": GBNF}, {"four", "five"}),
        ({"guided_choice": ["four", "five"]}, {"four", "five"}),
    ],
    ids=lambda v: next(iter(v)) if isinstance(v, dict) else "",
)
def test_a_form_in_any_servers_words(
    model: Server, endpoint: Endpoint, field: dict[str, Any], allowed: set[str]
) -> None:
    assert _said(model, endpoint, "Count", **field) in allowed


@formed
@pytest.mark.parametrize(
    "field",
    [
        {"json_schema": NUMBER},
        {"json_schema": json.dumps(NUMBER)},
        {"structured_outputs": {"json": NUMBER}},
        {"structured_outputs": {"json": NUMBER, "disable_any_whitespace": True}},
    ],
)
def test_a_schema_in_any_servers_words(
    model: Server, endpoint: Endpoint, field: dict[str, Any]
) -> None:
    text = _said(model, endpoint, "Count", **field)
    assert json.loads(text)["n"] in (True, False)
    if "disable_any_whitespace" in field.get("structured_outputs", {}):
        assert " " not in text and "\n" not in text


@formed
def test_forms_that_contradict_or_cannot_be(model: Server, endpoint: Endpoint) -> None:
    assert "only one" in _refused(model, endpoint, regex="a", ebnf=GBNF)
    assert "exactly one" in _refused(model, endpoint, structured_outputs={})
    both = {"regex": "a", "choice": ["b"]}
    assert "exactly one" in _refused(model, endpoint, structured_outputs=both)
    tagged = {"regex": "a", "structural_tag": "x"}
    assert "structural_tag" in _refused(model, endpoint, structured_outputs=tagged)
    assert "grammar" in _refused(model, endpoint, grammar="root ::= (")


@every
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n_predict", 5),
        ("allowed_token_ids", [1, 2]),
        ("dry_multiplier", 0.8),
        ("use_beam_search", True),
        ("logits_processors", ["x"]),
        ("guided_whitespace_pattern", " "),
    ],
)
def test_what_changes_the_answer_and_is_not_there_is_refused_by_name(
    model: Server, endpoint: Endpoint, name: str, value: Any
) -> None:
    assert name in _refused(model, endpoint, **{name: value})


@every
def test_what_asks_for_nothing_is_no_reason_to_refuse(model: Server, endpoint: Endpoint) -> None:
    nothing = {"dry_multiplier": 0, "use_beam_search": False, "allowed_token_ids": None, "n": 1}
    assert _said(model, endpoint, "Count", **nothing) == COUNTED


@every
def test_a_field_of_another_protocol_is_refused_or_honoured(
    model: Server, endpoint: Endpoint
) -> None:
    """Never left out without a word."""
    fields = {"max_new_tokens": 2, "stop_sequences": ["4"], "repeat_penalty": 2.0, "think": True}
    for name, value in fields.items():
        body = endpoint.body(turn(endpoint, "Count"), **SHORT) | {name: value, "stream": False}
        response = model.post(endpoint.path, body)
        if response.status_code == 200:
            assert endpoint.read(response.json()).text != COUNTED or name == "think"
            assert "x-millrace-ignored" not in response.headers
        else:
            assert response.status_code == 400 and name in endpoint.error(response)


@every_talk
def test_thinking_is_switched_off_in_each_spelling(model: Server, endpoint: Endpoint) -> None:
    spellings: list[dict[str, Any]] = [{"thinking": {"type": "disabled"}}]
    if endpoint is not OLLAMA:
        spellings.append({"chat_template_kwargs": {"enable_thinking": False}})
    if endpoint in (CHAT, RESPONSES):
        spellings += [{"enable_thinking": False}, {"chat_template_kwargs": {"thinking": False}}]
    for spelling in spellings:
        if endpoint is OLLAMA:
            assert "thinking" in _refused(model, endpoint, **spelling)
            continue
        body = endpoint.body("ponder", **SHORT) | spelling
        said = endpoint.whole(model.http, body)
        assert (said.thought, said.text) == ("", "Done."), spelling
        assert endpoint.stream(model.http, body) == said
    body = endpoint.body("ponder", **SHORT)
    if endpoint in (CHAT, RESPONSES):
        body |= {"thinking": {"type": "enabled", "budget_tokens": 2}}
        said = endpoint.whole(model.http, body)
        assert said.thought and said.thought != "Well, well.", "the budget is kept"


def test_wishes_about_thinking_that_contradict(model: Server) -> None:
    off = {"type": "disabled"}
    assert "contradict" in _refused(model, CHAT, thinking=off, enable_thinking=True)
    kwargs = {"enable_thinking": True}
    assert "contradict" in _refused(model, CHAT, thinking=off, chat_template_kwargs=kwargs)
    budgets = {"thinking": {"type": "enabled", "budget_tokens": 3}, "thinking_token_budget": 4}
    assert "contradict" in _refused(model, CHAT, **budgets)
    assert "thinking" in _refused(model, COMPLETIONS, enable_thinking=False)


@every
def test_extra_body_is_read_as_its_fields(model: Server, endpoint: Endpoint) -> None:
    plain = endpoint.body(turn(endpoint, "Count"), **SHORT)
    short = endpoint.body(turn(endpoint, "Count"), **SHORT | {"max_tokens": 3})
    changed = {k: v for k, v in short.items() if plain.get(k) != v}
    said = endpoint.whole(model.http, plain | {"extra_body": changed})
    assert said.finish == "length" and said.generated == 3
    assert "extra_body" in _refused(model, endpoint, extra_body="x")
    assert "dry_multiplier" in _refused(model, endpoint, extra_body={"dry_multiplier": 2})


def _bad_words(endpoint: Endpoint, words: list[str]) -> dict[str, Any]:
    body = endpoint.body(turn(endpoint, "Count"), **SHORT)
    inner = {"/generate": "sampling_params", "/api/chat": "options"}.get(endpoint.path)
    (body[inner] if inner else body)["bad_words"] = words
    return body


@every
def test_a_bad_word_is_never_said(model: Server, endpoint: Endpoint) -> None:
    """The scripted model says " and" in the place of what it may not say."""
    for word in ("4", "4, 5", ", 4"):
        text = endpoint.whole(model.http, _bad_words(endpoint, [word])).text
        assert word not in text and " and" in text, word
    assert endpoint.whole(model.http, _bad_words(endpoint, ["4, 6", "x"])).text == COUNTED
    for wrong in (" ", ""):
        response = model.post(endpoint.path, _bad_words(endpoint, [wrong]))
        assert response.status_code == 400 and "bad_words" in endpoint.error(response)


def test_ollamas_tool_choice(model: Server) -> None:
    body = OLLAMA.body("Count", tools=[LOOK], **SHORT)
    for choice in ("required", {"type": "function", "function": {"name": "look"}}):
        said = OLLAMA.whole(model.http, body | {"tool_choice": choice})
        assert [c.name for c in said.calls] == ["look"]
        assert OLLAMA.stream(model.http, body | {"tool_choice": choice}).calls == said.calls
    asked = OLLAMA.body("look", tools=[LOOK], **SHORT)
    assert OLLAMA.whole(model.http, asked).calls
    assert not OLLAMA.whole(model.http, asked | {"tool_choice": "none"}).calls
    wrong = {"tool_choice": {"type": "function", "function": {"name": "fly"}}}
    response = model.post(OLLAMA.path, body | wrong)
    assert response.status_code == 400 and "fly" in OLLAMA.error(response)


def test_ollamas_num_ctx_is_the_window(model: Server) -> None:
    free = OLLAMA.whole(model.http, OLLAMA.body("Count", **SHORT))
    body = OLLAMA.body("Count", **SHORT)
    body["options"]["num_ctx"] = free.prompt + 4
    cut = OLLAMA.whole(model.http, body)
    assert (cut.finish, cut.generated) == ("length", 4) and COUNTED.startswith(cut.text)
    body["options"]["num_ctx"] = free.prompt
    response = model.post(OLLAMA.path, body)
    assert response.status_code == 400 and str(free.prompt) in OLLAMA.error(response)


def test_max_completion_tokens_on_completions(model: Server) -> None:
    body = {"prompt": turn(COMPLETIONS, "Count"), "temperature": 0, "max_completion_tokens": 3}
    assert COMPLETIONS.whole(model.http, body).generated == 3
