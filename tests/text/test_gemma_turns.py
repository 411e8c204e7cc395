"""Conversations for templates with strict turns, as Gemma 2's and Gemma 3's are."""

from __future__ import annotations

import ast
import json
import zipfile
from typing import Any

import pytest
from test_formats_support import MATERIAL, TOOLS, function

from millrace.text.formats import by_name, detect, tool_from_openai
from millrace.text.formats.style import probe
from millrace.text.formats.tool_prompt import show_tools
from millrace.text.messages import PreparedMessages, prepare
from millrace.text.template import ChatTemplate

STRICT = """
{%- if messages[0].role == 'system' %}
{%- set lead = messages[0].content + '\n\n' %}{% set rest = messages[1:] %}
{%- else %}{% set lead = '' %}{% set rest = messages %}{% endif %}
{%- for m in rest %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('alternate') }}{% endif %}
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}
{{- (lead if loop.first else '') + m.content | trim + '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}<start_of_turn>model\n{% endif %}
"""
WITHOUT_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}"


def real(name: str) -> str:
    path = MATERIAL / "tokenizers" / "gemma3.zip"
    if name == "gemma-3" and path.exists():
        with zipfile.ZipFile(path) as archive:
            entry = next(n for n in archive.namelist() if n.endswith("tokenizer_config.json"))
            return str(json.loads(archive.read(entry))["chat_template"])
    template = MATERIAL / "templates" / "google-gemma-2-2b-it.jinja"
    if name == "gemma-2" and template.exists():
        return template.read_text()
    pytest.skip(f"no template of {name} in {MATERIAL}")


def template_of(name: str) -> str:
    return {"strict": STRICT, "roleless": WITHOUT_SYSTEM + STRICT}.get(name) or real(name)


templates = pytest.mark.parametrize("name", ["strict", "roleless", "gemma-2", "gemma-3"])


def ready(source: str, messages: list[dict[str, Any]], tools: Any = None) -> tuple[str, Any]:
    template = ChatTemplate(source, bos_token="<bos>")
    prepared: PreparedMessages = prepare(messages, tools, probe(template), detect(source))
    return template.render(prepared.messages, tools=prepared.tools), prepared.messages


def turns(text: str) -> list[str]:
    return [part.partition("\n")[0] for part in text.split("<start_of_turn>")[1:]]


def said(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


@templates
@pytest.mark.parametrize(
    "roles",
    [
        "a u",
        "s a u",
        "a a u u",
        "u u",
        "s u s u",
        "u a a u",
        "s a a u a u u",
        "u a s u",
        "s s u",
        "a u a u",
    ],
)
def test_turns_alternate_and_begin_with_the_user(name: str, roles: str) -> None:
    names = {"a": "assistant", "u": "user", "s": "system"}
    messages = [said(names[role], f"text{i}.") for i, role in enumerate(roles.split())]
    text, _ = ready(template_of(name), messages)
    shown = turns(text)
    assert shown == (["user", "model"] * len(shown))[: len(shown)]
    assert shown[-1] == "model"
    places = [text.index(f"text{i}.") for i in range(len(messages))]
    assert places == sorted(places)


@templates
def test_calls_and_results_are_turns_too(name: str) -> None:
    call = {"id": "1", "function": {"name": "ping", "arguments": "{}"}}
    messages = [
        said("assistant", "Hello."),
        said("user", "Ping."),
        {**said("assistant", None), "tool_calls": [call]},
        {**said("tool", [{"type": "text", "text": "pong"}]), "tool_call_id": "1"},
        said("user", "Again."),
        {**said("assistant", "Yes."), "tool_calls": [call]},
        {**said("tool", "pong"), "tool_call_id": "1"},
    ]
    text, _ = ready(template_of(name), messages, TOOLS)
    shown = turns(text)
    assert shown == ["user", "model"] * 4
    assert "```tool_code\nping()\n```" in text
    assert "```tool_output\npong\n```" in text
    assert "def ping():" in text.partition("Hello.")[0]


def test_an_empty_turn_only_where_it_is_needed() -> None:
    messages = [said("assistant", "Hi."), said("user", "Hello.")]
    assert ready(STRICT, messages)[1][0] == said("user", "")
    assert ready(STRICT, messages[1:])[1] == messages[1:]
    loose = STRICT.replace("(m.role == 'user') != (loop.index0 % 2 == 0)", "false")
    assert ready(loose, messages)[1] == messages


def test_the_system_message_goes_before_an_assistant_that_speaks_first() -> None:
    messages = [said("system", "Be brief."), said("assistant", "Hi."), said("user", "Hello.")]
    _, prepared = ready(WITHOUT_SYSTEM + STRICT, messages)
    assert prepared == [said("user", "Be brief."), *messages[1:]]


def test_parts_are_lines_where_the_template_has_none() -> None:
    parts = [{"type": "text", "text": "One."}, {"type": "text", "text": "Two."}]
    assert ready(STRICT, [said("user", parts)])[1] == [said("user", "One.\nTwo.")]
    text, _ = ready(STRICT, [said("system", parts), said("user", parts)])
    assert "One.\nTwo.\n\nOne.\nTwo.<end_of_turn>" in text
    takes = STRICT.replace(
        "m.content | trim",
        "(m.content if m.content is string else m.content | map(attribute='text') | join('|'))",
    )
    assert "One.Two.<end_of_turn>" in ready(takes, [said("user", parts)])[0]


def test_stubs_have_typed_defaults() -> None:
    tool = function(
        "f",
        {
            "optional": {"type": "string"},
            "needed": {"type": "integer"},
            "count": {"type": "integer", "default": "3"},
            "flag": {"type": "boolean", "default": "true"},
            "ratio": {"type": "number", "default": 1},
            "name": {"type": "string", "default": "a'b"},
            "names": {"type": "array", "items": {"type": "string"}, "default": ["x"]},
            "maybe": {"type": ["string", "null"], "default": None},
            "nothing": {"type": "object", "default": None},
            "either": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
            "free": {},
        },
        ["needed"],
    )
    shown = show_tools(by_name("gemma-3"), [tool_from_openai(tool)])
    stub = shown.partition("```python\n")[2].partition("\n```")[0]
    (definition,) = ast.parse(stub).body
    assert isinstance(definition, ast.FunctionDef)
    assert ast.unparse(definition.args) == (
        "needed: int, optional: str | None=None, count: int=3, flag: bool=True, ratio: float=1, "
        "name: str=\"a'b\", names: list[str]=['x'], maybe: None | str=None, "
        "nothing: dict | None=None, either: int | str | None=None, free: object=None"
    )
