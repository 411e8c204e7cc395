"""What single families do in their own way, and how a family is found or named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_formats_support import PING, SPECS, WEATHER, fold, function, read

from millrace.errors import BadRequest, SetupError
from millrace.text.formats import (
    by_name,
    choose,
    detect,
    names,
    thought_by_name,
    thought_names,
    tool_from_openai,
)
from millrace.text.formats.call_encoder import Call, write_calls
from millrace.text.grammar import calls_grammar, strict_grammar

PING_CALL = Call("ping", {}, "abcdefgh2")


def test_arguments_before_the_name() -> None:
    text = '<tool_call>{"arguments": {"city": "Bern"}, "name": "get_weather"}</tool_call>'
    assert fold(read(by_name("hermes"), list(text))).calls == [("get_weather", {"city": "Bern"})]


def test_arguments_as_json_inside_a_string() -> None:
    text = '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"B\\u00e9\\"}"}</tool_call>'
    assert fold(read(by_name("hermes"), list(text))).calls == [("get_weather", {"city": "Bé"})]


def test_sloppy_json_comes_out_strict() -> None:
    body = (
        '{"name": "get_weather", "arguments": {"city": "a\nb\\d", "hourly": True, "tags": ["x",],}}'
    )
    answer = fold(read(by_name("hermes"), list(f"<tool_call>{body}</tool_call>")))
    assert answer.calls == [("get_weather", {"city": "a\nb\\d", "hourly": True, "tags": ["x"]})]


def test_both_forms_of_mistral() -> None:
    for text in (
        '[TOOL_CALLS][{"name": "ping", "arguments": {}, "id": "abcdefghi"}]',
        "[TOOL_CALLS]ping[ARGS]{}",
        "[TOOL_CALLS]ping[CALL_ID]abcdefghi[ARGS]{}",
        "[TOOL_CALLS]ping{}",
    ):
        assert fold(read(by_name("mistral"), list(text))).calls == [("ping", {})]
    assert fold(
        read(by_name("mistral"), [text.replace("ping{", "ping[CALL_ID]abcdefghi[ARGS]{")])
    ).ids == ["abcdefghi"]


def test_kimi_keeps_its_own_ids() -> None:
    text = write_calls(by_name("kimi-k2"), [PING_CALL, PING_CALL])
    assert fold(read(by_name("kimi-k2"), [text])).ids == ["functions.ping:0", "functions.ping:1"]


LLAMA = by_name("llama-3")


def test_bare_json_is_a_call_only_of_an_offered_tool() -> None:
    call = '{"name": "get_weather", "parameters": {"city": "Bern"}}'
    assert fold(read(LLAMA, list(call))).calls == [("get_weather", {"city": "Bern"})]
    assert fold(read(LLAMA, list(f"{call}; {call}"))).names == ["get_weather"] * 2
    for other in (
        '{"name": "Ann", "parameters": {}}',
        '{"name": "get_weather"}',
        '{"a": 1}',
        "{ x }",
    ):
        answer = fold(read(LLAMA, list(other)))
        assert (answer.names, answer.content) == ([], other)
    assert fold(read(LLAMA, list(call), None)).content == call


def test_python_tag() -> None:
    text = '<|python_tag|>get_weather.call(city="Bern", count=2)<|eom_id|>'
    assert fold(read(LLAMA, list(text))).calls == [("get_weather", {"city": "Bern", "count": 2})]


def fence(body: str) -> Any:
    return fold(read(by_name("gemma-3"), list(f"Sure.\n```tool_code\n{body}\n```\n")))


def test_gemma_fences() -> None:
    want = [("get_weather", {"city": "Bern"})]
    assert fence("get_weather(city='Bern')").calls == want
    assert fence("print(get_weather('Bern'))").calls == want
    assert fence("get_weather Bern").calls == want
    assert fence('[get_weather(city="Bern")]').calls == want
    assert fence("get_weather(city='Bern')\nping()").names == ["get_weather", "ping"]
    answer = fence("other(1)")
    assert answer.content == "Sure.\n```tool_code\nother(1)\n```\n"


def test_types_come_from_the_schema() -> None:
    tool = tool_from_openai(
        function(
            "f",
            {
                "text": {"type": "string"},
                "whole": {"type": "integer"},
                "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                "either": {"type": ["integer", "string"]},
                "listed": {"$ref": "#/$defs/names"},
                "free": {},
            },
        )
    )
    defs = {**tool.parameters, "$defs": {"names": {"type": "array"}}}
    tool = type(tool)("f", defs)
    values = {
        "text": "12",
        "whole": "3.0",
        "maybe": "null",
        "either": "x1",
        "listed": "['a']",
        "free": "tr",
    }
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    text = f"<tool_call>\n<function=f>\n{body}</function>\n</tool_call>"
    (call,) = fold(read(by_name("qwen3-coder"), list(text), [tool])).calls
    assert call == (
        "f",
        {"text": "12", "whole": 3, "maybe": None, "either": "x1", "listed": ["a"], "free": "tr"},
    )


def test_names_and_overrides() -> None:
    assert by_name("hermes").name == "hermes"
    assert choose("<tool_call>", tool_format="glm", reasoning_format="mistral").name == "glm"
    assert choose("<tool_call>", reasoning_format="mistral").thought == thought_by_name("mistral")
    assert choose("<tool_call> </think>", reasoning_format="none").thought is None
    assert len(names()) == len(set(names()))
    assert len(thought_names()) == len(set(thought_names()))
    for ask in (by_name, thought_by_name):
        with pytest.raises(SetupError, match="hermes|think"):
            ask("nonsense")


def test_detection_without_the_real_templates() -> None:
    assert detect("{{ messages }}").name == "plain"
    assert detect('<tool_call>\n{"name"').name == "hermes"
    assert detect("<tool_call><function=x><parameter=y>").name == "qwen3-coder"
    assert detect("<tool_call>x<arg_key>").name == "glm"
    assert detect("", {"<tool_call>", "<think>", "</think>"}).thought == thought_by_name("think")
    assert detect("<start_of_turn>").python_tools
    format = detect("x", {"<|im_end|>", "<|endoftext|>"})
    assert fold(read(format, ["Hi<|im_", "end|>"])).content == "Hi"


def test_tool_shapes() -> None:
    assert tool_from_openai(WEATHER).required == ("city",)
    assert tool_from_openai(PING).properties == {}


def test_the_table_in_the_docs_has_every_family_and_says_what_is_enforced() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "formats.md").read_text()
    table = page.partition("## Families")[2].partition("## Reasoning")[0]
    rows = [
        line.replace("\\|", "/").strip("|").split("|")
        for line in table.splitlines()
        if "| `" in line
    ]
    assert sorted(row[0].strip(" `") for row in rows) == sorted(names())
    tools = [type(tool)(tool.name, tool.parameters, "", True) for tool in SPECS]
    for name, *_, enforced, strict in ([cell.strip() for cell in row] for row in rows):
        format = by_name(name.strip("`"))
        assert calls_grammar(format, tools, {}) and enforced == "yes"
        try:
            assert strict_grammar(format, tools, {}) is not None
            assert strict == "yes", name
        except BadRequest:
            assert strict.startswith("no"), name
    reasoning = page.partition("## Reasoning")[2].partition("## Evidence")[0]
    assert all(f"`{name}`" in reasoning for name in thought_names() if name != "none")
