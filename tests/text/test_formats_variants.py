"""Variants that single models write: other bodies in their own tags, repeated and quoted values."""

from __future__ import annotations

from typing import Any

import pytest
from test_formats_support import PING, SPECS, answer_to, fold, function, read

from millrace.text.formats import by_name, tool_from_openai

BERN = '{"name": "get_weather", "arguments": {"city": "Bern"}}'
PINGED = '{"name": "ping", "arguments": {}}'
WEATHER = ("get_weather", {"city": "Bern"})
LFM2 = by_name("lfm2")
START, END = "<|tool_call_start|>", "<|tool_call_end|>"


@pytest.mark.parametrize(
    ("body", "calls"),
    [
        (f"[{BERN}]", [WEATHER]),
        (BERN, [WEATHER]),
        (f" [{BERN}, {PINGED}] ", [WEATHER, ("ping", {})]),
        (f"{BERN}\n{PINGED}", [WEATHER, ("ping", {})]),
        (BERN.replace("arguments", "parameters"), [WEATHER]),
        (' [get_weather(city="Bern"), ping()]', [WEATHER, ("ping", {})]),
        ("[get_weather(properties={'city': 'Bern', 'count': 2})]",
         [("get_weather", {"city": "Bern", "count": 2})]),
        ("[get_weather(properties={'town': 'Bern'})]",
         [("get_weather", {"properties": {"town": "Bern"}})]),
        ("[get_weather(city='Bern', count=07)]", [("get_weather", {"city": "Bern", "count": 7})]),
        ("[]", []),
    ],
)  # fmt: skip
def test_lfm2_bodies(body: str, calls: list[Any]) -> None:
    for text in (f"{START}{body}{END}", f"Well.\n{START}{body}{END}"):
        answer = answer_to(LFM2, text)
        assert answer.calls == calls
        assert answer.content == ("Well." if text.startswith("Well") else "")


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("nemotron", "<TOOLCALL>[]</TOOLCALL>"),
        ("phi", "<|tool_call|>[ ]<|/tool_call|>"),
        ("hunyuan-a13b", "<tool_calls>[]</tool_calls>"),
        ("command-r", "<|START_ACTION|>[\n]<|END_ACTION|>"),
        ("mistral", "[TOOL_CALLS][]"),
        ("apertus", "<|tools_prefix|>[]<|tools_suffix|>"),
        ("olmo3", "<function_calls>[]</function_calls>"),
    ],
)
def test_a_list_of_no_calls_is_nothing(family: str, text: str) -> None:
    answer = answer_to(by_name(family), f"Well. {text}")
    assert (answer.content, answer.names) == ("Well.", [])


@pytest.mark.parametrize("body", ['[get_weather(city="Bern")]', "[ping()]", f"[{BERN}]", BERN])
@pytest.mark.parametrize(
    ("between", "after", "content"),
    [
        ("", "", ""),
        ("\n", "\n", ""),
        ("", END, ""),
        ("", "\nSo I ask.", "So I ask."),
        ("\n\n", f"{END} So I ask.", "So I ask."),
    ],
)
def test_lfm2_repeats_a_body_as_text(body: str, between: str, after: str, content: str) -> None:
    answer = answer_to(LFM2, f"{START}{body}{END}{between}{body}{after}")
    assert (len(answer.calls), answer.content) == (1, content)


def test_lfm2_other_text_after_a_call_is_content() -> None:
    call = f'{START}[get_weather(city="Bern")]{END}'
    for text in ("[get_weather", "[1, 2]", 'I call [get_weather(city="Bern")].', "Fine."):
        assert answer_to(LFM2, call + text).content == text
    assert answer_to(LFM2, call + call).names == ["get_weather"] * 2
    cut = answer_to(LFM2, f"{call}[get_wea", truncated=True)
    assert (cut.content, cut.names) == ("", ["get_weather"])


@pytest.mark.parametrize(
    "text",
    [
        '<functionname="get_weather"><paramname="city">Bern</param></function>',
        "<functionname=get_weather><paramname=city>Bern</param></function>",
        '<functionname="get_weather"><param name="city"><![CDATA[Bern]]></param></function>',
        '<function name="get_weather"><arguments><param name="city">Bern</param></arguments>'
        "</function>",
        '<function name="get_weather">\n<paramname="city">Bern\n<param name="count"/></function>',
    ],
)
def test_minicpm_without_blanks(text: str) -> None:
    format = by_name("minicpm5")
    for around in ("", "<think>Hm.</think>\n"):
        answer = answer_to(format, around + text)
        assert (answer.content, answer.names) == ("", ["get_weather"])
        assert answer.calls[0][1]["city"].strip() == "Bern"
    ping = answer_to(format, '<functionname="ping"/>Done.')
    assert (ping.calls, ping.content) == ([("ping", {})], "Done.")


KINDS = tool_from_openai(
    function(
        "f",
        {
            "text": {"type": "string"},
            "unit": {"type": "string", "enum": ["c", "k"]},
            "maybe": {"type": ["string", "null"]},
            "whole": {"type": "integer"},
            "yes": {"type": "boolean"},
            "many": {"type": "array", "items": {"type": "integer"}},
        },
    )
)


@pytest.mark.parametrize("family", ["glm", "glm-4.7", "hunyuan-bare", "longcat", "qwen3-coder"])
@pytest.mark.parametrize(
    ("key", "value", "meant"),
    [
        ("whole", '"7"', 7),
        ("whole", '\\"7\\"', 7),
        ("whole", "7x", "7x"),
        ("yes", '"true"', True),
        ("many", '"[1, 2]"', [1, 2]),
        ("unit", '"k"', "k"),
        ("maybe", '"null"', "null"),
        ("maybe", '"a b"', "a b"),
        ("maybe", "null", None),
        ("text", '"a b"', '"a b"'),
        ("text", 'say "a"', 'say "a"'),
        ("text", "7", "7"),
    ],
)
def test_a_value_in_quotes_follows_the_schema(
    family: str, key: str, value: str, meant: Any
) -> None:
    tag = "longcat_" if family == "longcat" else ""
    text = (
        f"<{tag}tool_call>f\n<{tag}arg_key>{key}</{tag}arg_key>\n"
        f"<{tag}arg_value>{value}</{tag}arg_value>\n</{tag}tool_call>"
    )
    if family == "qwen3-coder":
        text = f"<tool_call><function=f><parameter={key}>{value}</parameter></function></tool_call>"
    ((_, arguments),) = answer_to(by_name(family), text, [KINDS]).calls
    assert arguments == {key: meant}
    assert type(arguments[key]) is type(meant)


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("glm", '<tool_call>get_weather\n{"city": "Bern"}\n</tool_call>'),
        ("qwen3-coder", '<tool_call>\n<function=get_weather>\n{"city": "Bern"}\n</function>\n'
         "</tool_call>"),
        ("minimax-m2", '<minimax:tool_call>\n<invoke name="get_weather">{"city": "Bern"}</invoke>\n'
         "</minimax:tool_call>"),
        ("seed-oss", '<seed:tool_call><function=get_weather>{"city": "Bern"}</function>'
         "</seed:tool_call>"),
    ],
)  # fmt: skip
def test_arguments_as_json_where_tags_belong(family: str, text: str) -> None:
    answer = answer_to(by_name(family), text)
    assert (answer.content, answer.calls) == ("", [WEATHER])


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("minimax-m2", '<minimax:tool_call>\n<invoke name="ping"/>\n</minimax:tool_call>'),
        ("qwen3-coder", "<tool_call>\n<function=ping/>\n</tool_call>"),
        ("step3", '<｜tool_calls_begin｜><steptml:invoke name="ping" /><｜tool_calls_end｜>'),
    ],
)
def test_tags_without_a_body(family: str, text: str) -> None:
    answer = answer_to(by_name(family), text, [*SPECS, tool_from_openai(PING)])
    assert (answer.content, answer.calls) == ("", [("ping", {})])


def test_arguments_stream_out_of_a_json_body() -> None:
    text = '<tool_call>\n<function=get_weather>\n{"city": "a long name of a place, and mo'
    pieces = read(by_name("qwen3-coder"), list(text), truncated=True)
    assert fold(pieces).arguments == ['{"city": "a long name of a place, and mo']
    assert len(pieces) > 10
