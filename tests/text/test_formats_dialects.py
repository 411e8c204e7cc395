"""Texts as models of single families write them, beyond what their templates show."""

from __future__ import annotations

from typing import Any

import pytest
from test_formats_support import SPECS, answer_to, function

from millrace.text.formats import by_name, detect, tool_from_openai
from millrace.text.formats.call_encoder import Call, write_calls

BERN = '{"name": "get_weather", "arguments": {"city": "Bern"}}'
PING = '{"name": "ping", "arguments": {}}'
WEATHER = ("get_weather", {"city": "Bern"})
PINGED = ("ping", {})
TAGGED = "<function=get_weather>\n<parameter=city>\nBern\n</parameter>\n</function>"
KEYED = "<arg_key>city</arg_key>\n<arg_value>Bern</arg_value>\n"


@pytest.mark.parametrize(
    ("family", "text", "calls"),
    [
        ("granite", f"<tool_call> [{BERN}, {PING}]", [WEATHER, PINGED]),
        ("granite", f"<|tool_call|>[{BERN}]", [WEATHER]),
        ("granite", f"<tool_call>[{BERN}]</tool_call>", [WEATHER]),
        ("granite-20b", f"<function_call> {BERN} <function_call> {PING}", [WEATHER, PINGED]),
        ("hunyuan", "<tool_calls>\n<tool_call>get_weather<tool_sep>\n" + KEYED
         + "</tool_call>\n</tool_calls>", [WEATHER]),
        ("hunyuan-bare", "<tool_calls><tool_call>get_weather<tool_sep>" + KEYED + "</tool_call>"
         "<tool_call>ping<tool_sep></tool_call></tool_calls>", [WEATHER, PINGED]),
        ("hunyuan-a13b", f"<answer>\n<tool_calls>[{BERN}, {PING}]</tool_calls>\n</answer>",
         [WEATHER, PINGED]),
        ("hermes", f"<tool_call>\n{TAGGED}\n</tool_call>", [WEATHER]),
        ("hermes", f"{TAGGED}", [WEATHER]),
        ("hermes", '<function=get_weather>{"city": "Bern"}</function>', [WEATHER]),
        ("hermes", f"<tools>\n{BERN}\n</tools>", [WEATHER]),
        ("qwen3-coder", f"<tool_call>\n{BERN}\n</tool_call>", [WEATHER]),
        ("xlam", f"```json\n[{BERN}, {PING}]\n```", [WEATHER, PINGED]),
        ("xlam", f"```\n{BERN}\n```", [WEATHER]),
        ("xlam", f"<tool_call>[{BERN}]</tool_call>", [WEATHER]),
        ("xlam", f"[TOOL_CALLS][{BERN}]", [WEATHER]),
        ("internlm", "<|action_start|><|plugin|>\n" + BERN.replace("arguments", "parameters")
         + "<|action_end|>", [WEATHER]),
        ("internlm", f"<|action_start|> <|plugin|>{BERN}<|action_end|>", [WEATHER]),
        ("step3", "<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜>"
         '<steptml:invoke name="get_weather"><steptml:parameter name="city">Bern'
         "</steptml:parameter></steptml:invoke><｜tool_call_end｜><｜tool_call_begin｜>function"
         '<｜tool_sep｜><steptml:invoke name="ping"></steptml:invoke><｜tool_call_end｜>'
         "<｜tool_calls_end｜>", [WEATHER, PINGED]),
        ("longcat", f"<longcat_tool_call>\n{BERN}\n</longcat_tool_call>", [WEATHER]),
        ("longcat-json", "<longcat_tool_call>get_weather\n<longcat_arg_key>city</longcat_arg_key>\n"
         "<longcat_arg_value>Bern</longcat_arg_value>\n</longcat_tool_call>", [WEATHER]),
        ("olmo3", '<function_calls>get_weather(city="Bern")\nping()</function_calls>',
         [WEATHER, PINGED]),
        ("olmo3", "<function_calls>\nget_weather(city='Bern', hourly=null)\n</function_calls>",
         [("get_weather", {"city": "Bern", "hourly": None})]),
        ("dots", '<dots_function_call>\n<invoke name="get_weather">\n<parameter name="city">Bern'
         '</parameter>\n</invoke><invoke name="ping"></invoke>\n</dots_function_call>',
         [WEATHER, PINGED]),
        ("dots", f"<dots_function_call>{BERN}</dots_function_call>", [WEATHER]),
        ("minicpm5", '<function name="get_weather"><param name="city">Bern</param></function>',
         [WEATHER]),
        ("minicpm5", "<function name='get_weather'><param name='city'>Bern</param></function>",
         [WEATHER]),
        ("minicpm5", '<functionname="get_weather"><param name=city>Bern</param></function>',
         [WEATHER]),
        ("minicpm5", '<function name="get_weather"><param name="city"><![CDATA[a &lt; <b>\n]]>'
         "</param></function>", [("get_weather", {"city": "a &lt; <b>\n"})]),
        ("minicpm5", '<function name="get_weather"><param name="city">a &amp;&lt; b</param>'
         "</function>", [("get_weather", {"city": "a &< b"})]),
        ("minicpm5", '<function name="get_weather"><param name="properties">{"city": "Bern"}'
         "</param></function>", [WEATHER]),
        ("k2-horizon", "<ifm|tool_calls><ifm|tool_call>get_weather<ifm|arg_key>city</ifm|arg_key>"
         "<ifm|arg_value>Bern</ifm|arg_value></ifm|tool_call><ifm|tool_call>ping</ifm|tool_call>"
         "</ifm|tool_calls>", [WEATHER, PINGED]),
        ("k2-horizon", "<ifm|tool_calls>\n<ifm|tool_call>get_weather\n<ifm|arg_key>city"
         "</ifm|arg_key>\n<ifm|arg_type>string</ifm|arg_type>\n<ifm|arg_value>Bern"
         "</ifm|arg_value>\n</ifm|tool_call>\n</ifm|tool_calls>", [WEATHER]),
        ("k2-horizon", f"<ifm|tool_calls><ifm|tool_call>{BERN}</ifm|tool_call></ifm|tool_calls>",
         [WEATHER]),
        ("command-r", '<|START_ACTION|>[{"tool_call_id": "2", "tool_name": "ping", "parameters": '
         "{}}]<|END_ACTION|>", [PINGED]),
    ],
)  # fmt: skip
def test_what_a_family_writes(family: str, text: str, calls: list[Any]) -> None:
    answer = answer_to(by_name(family), text)
    assert (answer.content, answer.calls) == ("", calls)
    answer = answer_to(by_name(family), f"Well.\n{text}")
    assert (answer.content, answer.calls) == ("Well.", calls)


@pytest.mark.parametrize(
    "text",
    [
        f"<tool_call>{BERN}</tool_call>",
        f"<tools>\n{BERN}\n</tools>",
        f"<function_call>{BERN}</function_call>",
        f"<tool_calls>[{BERN}]</tool_calls>",
        f"[TOOL_CALLS] [{BERN}]",
        '[TOOL_CALLS]get_weather[ARGS]{"city": "Bern"}',
        '[Calling tool: get_weather({"city": "Bern"})]',
        '<function=get_weather>{"city": "Bern"}</function>',
        TAGGED,
        '<invoke name="get_weather"><parameter name="city">Bern</parameter></invoke>',
        '[get_weather(city="Bern")]',
        "```tool_code\nget_weather(city='Bern')\n```",
        f"<|python_tag|>{BERN}",
        f"```json\n{BERN}\n```",
        BERN,
    ],
)
def test_a_model_of_no_family_is_read_by_everybodys_markup(text: str) -> None:
    plain = by_name("plain")
    answer = answer_to(plain, text)
    assert (answer.content, answer.calls) == ("", [WEATHER])
    assert answer_to(plain, text, None).content == text
    other = text.replace("get_weather", "get_nothing")
    assert answer_to(plain, other).content == other


def test_citations_are_not_content() -> None:
    text = (
        "<|START_THINKING|>See <co>this</co: 0:[1]>.<|END_THINKING|><|START_RESPONSE|>It is "
        "<co>warm</co: 0:[1,2],1:[3]> in <co: 4>Bern</co: 4>, <color> <co x.<|END_RESPONSE|>"
    )
    answer = answer_to(by_name("command-r"), text)
    assert answer.content == "It is warm in Bern, <color> <co x."
    assert answer.reasoning == "See this."
    odd = "a <co: b\nc </co: " + "d" * 600 + " >"
    assert answer_to(by_name("command-r"), odd).content == odd
    assert answer_to(by_name("command-r-plus"), "a </co: 1", truncated=True).content.strip() == "a"


def test_call_ids_of_command_r_are_kept() -> None:
    text = write_calls(by_name("command-r"), [Call("ping", {}), Call("ping", {})])
    assert answer_to(by_name("command-r"), text).ids == ["0", "1"]
    again = text.replace('"1"', '"0"')
    first, second = answer_to(by_name("command-r"), again).ids
    assert (first, second[:5]) == ("0", "call_")


def test_the_closing_tag_inside_a_value_of_deepseek() -> None:
    value = "write </｜DSML｜parameter> & &lt;b>"
    for family in ("deepseek-v3.2", "deepseek-v4"):
        text = write_calls(by_name(family), [Call("get_weather", {"city": value, "count": 2})])
        assert "&lt;/｜DSML｜parameter>" in text
        want = [("get_weather", {"city": value, "count": 2})]
        assert answer_to(by_name(family), text).calls == want
        other = text.replace("&lt;/｜DSML｜parameter>", "&lt;/｜DSML｜parameter&gt;")
        assert answer_to(by_name(family), other).calls == want


def test_all_arguments_in_one_parameter() -> None:
    def call(key: str, value: str, string: str = "false") -> str:
        return (
            '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter '
            f'name="{key}" string="{string}">{value}</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
            "</｜DSML｜tool_calls>"
        )

    format = by_name("deepseek-v4")
    for key in ("arguments", "input"):
        assert answer_to(format, call(key, '{"city": "Bern"}')).calls == [WEATHER]
        other = '{"town": "Bern"}'
        want = [("get_weather", {key: {"town": "Bern"}})]
        assert answer_to(format, call(key, other)).calls == want
    own = tool_from_openai(function("get_weather", {"input": {"type": "object"}}))
    want = [("get_weather", {"input": {"city": "Bern"}})]
    assert answer_to(format, call("input", '{"city": "Bern"}'), [own]).calls == want


def test_a_type_that_the_tag_hints_at() -> None:
    tool = tool_from_openai(function("f", {"a": {"type": "string"}, "b": {}}))
    body = "".join(
        f"<ifm|arg_key>{key}</ifm|arg_key><ifm|arg_type>{kind}</ifm|arg_type>"
        f"<ifm|arg_value>{value}</ifm|arg_value>"
        for key, kind, value in (("a", "integer", "1"), ("b", "string", "2"), ("c", "int", "3"))
    )
    text = f"<ifm|tool_call>f{body}</ifm|tool_call>"
    assert answer_to(by_name("k2-horizon"), text, [tool]).calls == [
        ("f", {"a": "1", "b": "2", "c": 3})
    ]


def test_reasoning_of_k2_horizon_and_longcat() -> None:
    for family, name in (
        ("k2-horizon", "ifm|think"),
        ("k2-horizon", "ifm|think_faster"),
        ("longcat", "longcat_think"),
    ):
        answer = answer_to(by_name(family), f"<{name}>\nHm.\n</{name}>\n\nYes.")
        assert (answer.reasoning, answer.content) == ("Hm.", "Yes.")


@pytest.mark.parametrize(
    ("template", "family"),
    [
        ("<|action_start|><|plugin|>", "internlm"),
        ("steptml:invoke", "step3"),
        ("<longcat_tool_call>{", "longcat-json"),
        ("<longcat_tool_call><longcat_arg_key>", "longcat"),
        ("<functions></functions><function_calls>", "olmo3"),
        ("<dots_function_call>", "dots"),
        ("<function_call>", "granite-20b"),
        ("<ifm|tool_calls>", "k2-horizon"),
        ("<tool_calls><tool_call>x<tool_sep><arg_key>", "hunyuan-bare"),
        ("<answer><tool_calls>[", "hunyuan-a13b"),
        ("<tool_calls>", "minimax-m1"),
        ('"tool_call_name"', "xlam"),
    ],
)
def test_detection_by_what_a_template_says(template: str, family: str) -> None:
    assert detect(template).name == family


def test_detection_by_the_vocabulary() -> None:
    assert detect("", {"<|action_start|>", "<|plugin|>"}).name == "internlm"
    assert detect("", {"<longcat_tool_call>"}).name == "longcat-json"


def test_a_tool_nobody_offered_keeps_its_markup_out() -> None:
    for family in ("olmo3", "internlm", "dots", "step3", "k2-horizon", "granite-20b"):
        text = write_calls(by_name(family), [Call("nobody", {"a": 1})])
        answer = answer_to(by_name(family), text, SPECS)
        assert (answer.names, answer.content) == ([], '{"name": "nobody", "arguments": {"a": 1}}')
