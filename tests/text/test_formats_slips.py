"""Slips of single families: marks left out, misspelled or empty; names and values without quotes."""

from __future__ import annotations

from typing import Any

import pytest
from test_formats_support import SPECS, answer_to, function

from millrace.text.formats import by_name, tool_from_openai

BERN = '{"name": "get_weather", "arguments": {"city": "Bern"}}'
PING = '{"name": "ping", "arguments": {}}'
WEATHER = ("get_weather", {"city": "Bern"})
PINGED = ("ping", {})
NOBODY = '{"name": "nobody", "arguments": {}}'


def gemma(body: str, open: str = "<|tool_call>call:", close: str = "<tool_call|>") -> str:
    return f"{open}get_weather{{{body}}}{close}"


def kimi(header: str, body: str) -> str:
    return (
        f"<|tool_calls_section_begin|><|tool_call_begin|>{header}<|tool_call_argument_begin|>{body}"
        "<|tool_call_end|><|tool_calls_section_end|>"
    )


def deepseek(header: str, body: str) -> str:
    return (
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{header}{body}<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>"
    )


QUOTED = 'city:<|"|>Bern<|"|>'


@pytest.mark.parametrize(
    ("family", "text", "calls"),
    [
        ("gemma-4", gemma(QUOTED, "<|tool_call>:call:"), [WEATHER]),
        ("gemma-4", gemma(QUOTED, close="<turn|>"), [WEATHER]),
        ("gemma-4", gemma(QUOTED, "call:", ""), [WEATHER]),
        ("gemma-4", gemma(QUOTED, "call:", "<tool_call|>") + "\ncall:ping{}", [WEATHER, PINGED]),
        ("gemma-4", gemma(QUOTED, "<call>", ""), [WEATHER]),
        ("gemma-4", gemma("city:New York,count:2"), [("get_weather", {"city": "New York", "count": 2})]),
        ("gemma-4", gemma("city: 2024-01-31 , hourly: True"),
         [("get_weather", {"city": "2024-01-31", "hourly": True})]),
        ("gemma-4", gemma("ratio:108.,count:-7"), [("get_weather", {"ratio": 108.0, "count": -7})]),
        ("gemma-4", gemma("tags:[a b,<|\"|>c]<|\"|>],opts:{days:3}"),
         [("get_weather", {"tags": ["a b", "c]"], "opts": {"days": 3}})]),
        ("functiongemma", "call:get_weather{city:<escape>Bern<escape>}", [WEATHER]),
        ("kimi-k2", kimi("functions.ping:0", ""), [PINGED]),
        ("kimi-k2", kimi("0", '{"city": "Bern"}'), [WEATHER]),
        ("kimi-k2", kimi("functions.get_weather:0", '{"city": "Bern"}').replace("calls_s", "call_s"),
         [WEATHER]),
        ("deepseek-v3", deepseek("function<｜tool▁sep｜>ping", "\n```json\n```"), [PINGED]),
        ("deepseek-v3.1", deepseek("ping<｜tool▁sep｜>", ""), [PINGED]),
        ("deepseek-v3.1", deepseek("functions.ping<｜tool▁sep｜>", "{}"), [PINGED]),
        ("mistral", "[TOOL_CALLS]ping", [PINGED]),
        ("mistral", "[TOOL_CALLS]ping[ARGS]", [PINGED]),
        ("mistral", "[TOOL_CALLS]ping[TOOL_CALLS]ping{}", [PINGED, PINGED]),
        ("pythonic", '[get_weather(city="""Bern""")]', [WEATHER]),
        ("pythonic", "[get_weather(city='''a \"b\"\nc''', count=1)]",
         [("get_weather", {"city": 'a "b"\nc', "count": 1})]),
        ("pythonic", '[get_weather(city="", count=1)]', [("get_weather", {"city": "", "count": 1})]),
        ("pythonic", "[get_weather(**{'city': 'Bern'})]", [WEATHER]),
        ("lfm2", "<|tool_call_start|>[get_weather(count=2, **{'city': 'Bern'})]<|tool_call_end|>",
         [("get_weather", {"count": 2, "city": "Bern"})]),
        ("minimax-m2", "<minimax:tool_call><invoke name=get_weather><parameter name=city>Bern"
         "</parameter></invoke></minimax:tool_call>", [WEATHER]),
        ("minimax-m2", "<minimax:tool_call><invoke name='get_weather'><parameter name='city'>Bern"
         "</parameter></invoke></minimax:tool_call>", [WEATHER]),
        ("glm", "<tool_call>\nget_weather\n<arg_key>city</arg_key>\n<arg_value>Bern</arg_value>\n"
         "</tool_call>", [WEATHER]),
        ("gigachat", f"function call{BERN}", [WEATHER]),
        ("xlam", f'{{"tool_calls": [{BERN}, {PING}]}}', [WEATHER, PINGED]),
        ("hermes", f'{{"tool_calls": [{BERN}, {PING}]}}', [WEATHER, PINGED]),
        ("hermes", f'<tool_call>{{"tool_calls": [{PING}]}}</tool_call>', [PINGED]),
        ("hermes", f"<tool_call>{PING.replace('ping', 'functions.ping')}</tool_call>", [PINGED]),
        ("hermes", f"<tool_call>{PING.replace('ping', 'ping.ping')}</tool_call>", [PINGED]),
        ("hermes", f'<tool_call>[{PING}, "junk"]</tool_call>', [PINGED]),
    ],
)  # fmt: skip
def test_a_slip_costs_nothing(family: str, text: str, calls: list[Any]) -> None:
    format = by_name(family)
    answer = answer_to(format, text)
    assert (answer.content, answer.calls) == ("", calls)
    if format.thought is not None:
        thought = f"{format.thought.opens[0]}\nHm.\n{format.thought.closes[0]}"
        answer = answer_to(format, thought + text)
        assert (answer.content, answer.reasoning, answer.calls) == ("", "Hm.", calls)


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("gemma-4", "A call:home{x} and call: me, or <call>home{}."),
        ("gemma-4", "call:get_weather is how one asks"),
        ("kimi-k2", "Call 0 was it."),
        ("gigachat", "A function call{ is what it is."),
        ("xlam", '{"tool_calls": []}'),
        ("mistral", "ping[1]"),
        ("glm", "a\nget_weather\n"),
        ("hermes", '{"tool_calls": [1]}'),
    ],
)
def test_text_that_only_resembles_one_is_content(family: str, text: str) -> None:
    answer = answer_to(by_name(family), text)
    assert (answer.content, answer.names) == (text, [])


def test_a_name_that_is_only_a_number_must_fit_one_tool() -> None:
    other = tool_from_openai(function("other", {"city": {"type": "string"}}))
    kimi_k2 = by_name("kimi-k2")
    text = kimi("0", '{"city": "Bern"}')
    assert answer_to(kimi_k2, text, [*SPECS, other]).names == []
    assert answer_to(kimi_k2, text, [other]).names == ["other"]
    assert answer_to(kimi_k2, kimi("0", "{}")).names == []
    assert answer_to(kimi_k2, kimi("1", '{"city": "Be'), SPECS[:1]).calls == [
        ("get_weather", {"city": "Be"})
    ]


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("pythonic", "[ping(), nobody()]"),
        ("xlam", f"[{PING}, {NOBODY}]"),
        ("llama-3", f"[{PING}, {NOBODY}]"),
        ("hermes", f"<tool_call>[{PING}, {NOBODY}]</tool_call>"),
        ("mistral", f"[TOOL_CALLS][{PING}, {NOBODY}]"),
        ("lfm2", "<|tool_call_start|>[ping(), nobody()]<|tool_call_end|>"),
    ],
)
def test_a_tool_nobody_offered_in_a_list_with_a_real_call(family: str, text: str) -> None:
    answer = answer_to(by_name(family), text)
    assert (answer.content, answer.calls) == (NOBODY, [PINGED])


def test_messages_of_harmony_without_arguments() -> None:
    harmony = by_name("harmony")
    for body in ("", " ", "{}", "null"):
        text = f"<|channel|>commentary to=functions.ping <|constrain|>json<|message|>{body}<|call|>"
        assert answer_to(harmony, text, prompt=harmony.primers[0]).calls == [PINGED]
    text = "<|channel|>commentary to=functions.ping<|message|>nothing<|call|>"
    answer = answer_to(harmony, text, prompt=harmony.primers[0])
    assert (answer.content, answer.names) == ("nothing", [])


def test_a_call_that_a_limit_cut_before_its_arguments_is_none() -> None:
    for family, text in (
        ("mistral", "[TOOL_CALLS]ping"),
        ("mistral", "[TOOL_CALLS]ping[ARGS]"),
        ("kimi-k2", kimi("functions.ping:0", "").partition("<|tool_call_end|>")[0]),
    ):
        answer = answer_to(by_name(family), text, truncated=True)
        assert (answer.content, answer.names) == ("", [])
