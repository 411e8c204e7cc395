"""Messages brought into a template's style, with small templates that each want something else."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from test_formats_support import HOSTILE, SPECS, TOOLS, fold, read

from millrace.errors import BadRequest
from millrace.text.conversation import Conversation
from millrace.text.dialect import Dialect
from millrace.text.formats import OutputFormat, by_name, detect, thinking_controls
from millrace.text.formats.style import Style, probe
from millrace.text.formats.tool_prompt import show_result, show_tools
from millrace.text.messages import PreparedMessages, _merged, plain_text, prepare
from millrace.text.open_end import cut, open_ended
from millrace.text.template import ChatTemplate
from millrace.text.tokenizer import Tokenizer

CHATML = """
{%- if tools %}<tools>{% for t in tools %}{{ t | tojson }}{% endfor %}</tools>{% endif %}
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\n' }}
{%- if m.role == 'assistant' and m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}
{{- m.content or '' }}
{%- for c in m.tool_calls or [] %}
{{- '<tool_call>\n{"name": "' + c.function.name + '", "arguments": ' }}
{{- c.function.arguments | tojson + '}\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}
"""

ALTERNATING = """
{%- for m in messages %}
{%- if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Roles must alternate') }}
{%- endif %}
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}
{{- m.content | trim + '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}<start_of_turn>model\n{% endif %}
"""

STRINGS = """
{%- for m in messages %}
{%- if m.role == 'tool' %}[RESULT {{ m.tool_call_id }}]{{ m.content }}
{%- elif m.tool_calls %}
{%- if m.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}
{%- if m.tool_calls[0].id | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif %}
{%- set call = m.tool_calls[0] %}
{{- '[CALL ' + call.id + ']' + call.function.name + call.function.arguments }}
{%- else %}[{{ m.role }}]{{ m.content }}{% endif %}
{%- endfor %}
"""


def style_of(source: str) -> Style:
    return probe(ChatTemplate(source))


def ready(
    source: str, messages: list[dict[str, Any]], tools: Any = None
) -> tuple[str, PreparedMessages]:
    template = ChatTemplate(source)
    format = detect(source)
    prepared = prepare(messages, tools, probe(template), format)
    text = template.render(prepared.messages, tools=prepared.tools, **prepared.arguments)
    return text, prepared


def calling(arguments: Any = '{"city": "Bern"}', **more: Any) -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "call_1",
                    "type": "function",
                    "function": {"name": "get_weather", "arguments": arguments},
                },
                {"id": "call_2", "type": "function", "function": {"name": "ping", "arguments": ""}},
            ],
            **more,
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
        {"role": "tool", "tool_call_id": "call_2", "content": [{"type": "text", "text": "pong"}]},
    ]


def test_probing_tells_templates_apart() -> None:
    chatml = style_of(CHATML)
    assert chatml.system and chatml.calls and chatml.mapping and chatml.tools and chatml.results
    assert chatml.reasoning == "reasoning_content"
    assert not (chatml.alternate or chatml.one_call or chatml.short_ids or chatml.developer)
    gemma = style_of(ALTERNATING)
    assert gemma.alternate
    assert not (gemma.system or gemma.calls or gemma.tools or gemma.results)
    strings = style_of(STRINGS)
    assert strings.one_call and strings.short_ids and not strings.mapping


def test_arguments_become_objects() -> None:
    text, prepared = ready(CHATML, calling(), TOOLS)
    assert '{"name": "get_weather", "arguments": {"city": "Bern"}}' in text
    assert '{"name": "ping", "arguments": {}}' in text
    assert prepared.tools == TOOLS
    assert "pong<|im_end|>" in text


def test_arguments_become_text_ids_short_and_calls_single() -> None:
    text, prepared = ready(STRINGS, calling({"city": "Bern"}))
    assert [m["role"] for m in prepared.messages] == [
        "user",
        "assistant",
        "tool",
        "assistant",
        "tool",
    ]
    first, second = (m["tool_calls"][0]["id"] for m in prepared.messages if m.get("tool_calls"))
    assert len(first) == len(second) == 9 and first != second
    assert f'[CALL {first}]get_weather{{"city": "Bern"}}[RESULT {first}]sunny' in text
    assert f"[CALL {second}]ping{{}}[RESULT {second}]pong" in text


def test_nothing_that_was_passed_in_is_changed() -> None:
    messages = calling()
    before = json.dumps(messages)
    ready(STRINGS, messages, TOOLS)
    assert json.dumps(messages) == before


def test_invalid_arguments_of_an_earlier_turn_are_kept_as_text() -> None:
    text, _ = ready(CHATML, calling('{"city": "Be'))
    assert '{"text": "{\\"city\\": \\"Be"}' in text


def test_reasoning_of_earlier_turns_under_the_templates_key() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning": "Hm."},
        {"role": "user", "content": "c"},
    ]
    assert "<think>Hm.</think>b" in ready(CHATML, messages)[0]
    silent = CHATML.replace("m.reasoning_content", "false")
    prepared = ready(silent, messages)[1]
    assert "reasoning" not in prepared.messages[1]


def test_developer_and_several_system_messages() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "One."},
        {"role": "developer", "content": [{"type": "text", "text": "Two."}]},
        {
            "role": "user",
            "content": [{"type": "text", "text": "Hi "}, {"type": "text", "text": "you"}],
        },
    ]
    prepared = ready(CHATML, messages)[1]
    assert prepared.messages == [
        {"role": "system", "content": "One.\n\nTwo."},
        {"role": "user", "content": "Hi \nyou"},
    ]
    knows = CHATML.replace(
        "{%- for m in messages %}", "{#- developer -#}{%- for m in messages %}", 1
    )
    assert [m["role"] for m in ready(knows, messages)[1].messages] == [
        "system",
        "developer",
        "user",
    ]


def test_without_a_system_role_and_with_strict_turns() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi."},
        {"role": "user", "content": "There?"},
        {"role": "assistant", "content": "Yes."},
        {"role": "system", "content": "Now be long."},
        {"role": "user", "content": "Go."},
    ]
    _, prepared = ready(ALTERNATING, messages)
    assert prepared.messages == [
        {"role": "user", "content": "Be brief.\n\nHi.\n\nThere?"},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "Now be long.\n\nGo."},
    ]


def test_gemma_tools_are_python_and_results_are_fences() -> None:
    text, prepared = ready(ALTERNATING, calling({"city": "Bern", "hourly": True}), TOOLS)
    assert prepared.tools is None
    assert "def get_weather(city: str, opts: dict | None = None, tags: list[str] | None" in text
    assert '    """About get_weather.' in text
    assert "        city: city" in text
    assert "```tool_code\nget_weather(city='Bern', hourly=True)\nping()\n```" in text
    assert "```tool_output\nsunny\n```\n\n```tool_output\npong\n```" in text
    assert [m["role"] for m in prepared.messages] == ["user", "assistant", "user"]


@pytest.mark.parametrize("name", ["plain", "hermes", "lfm2", "gemma-3", "qwen3-coder", "mistral"])
def test_calls_a_template_cannot_write_are_written_for_it(name: str) -> None:
    format: OutputFormat = by_name(name)
    style = Style(calls=False, tools=False, results=False)
    prepared = prepare(calling(HOSTILE, reasoning_content="x"), TOOLS, style, format)
    (assistant,) = (m for m in prepared.messages if m["role"] == "assistant")
    answer = fold(read(format, [assistant["content"]], SPECS))
    assert answer.calls == [("get_weather", HOSTILE), ("ping", {})]
    assert "get_weather" in prepared.messages[0]["content"]


def test_results_get_their_functions_name() -> None:
    prepared = prepare(calling(), None, Style(), by_name("hermes"))
    assert [m.get("name") for m in prepared.messages[2:]] == ["get_weather", "ping"]


def test_kimi_ids_are_names_and_counts() -> None:
    prepared = prepare(calling() + calling(), None, Style(), by_name("kimi-k2"))
    ids = [c["id"] for m in prepared.messages for c in m.get("tool_calls") or ()]
    assert ids[:2] == ["functions.get_weather:0", "functions.ping:1"]
    assert prepared.messages[2]["tool_call_id"] == "functions.get_weather:0"


def test_parts_that_are_no_text_are_refused_for_models_without_pictures() -> None:
    parts = [{"type": "text", "text": "What is this?"}, {"type": "image", "digest": "d"}]
    with pytest.raises(BadRequest, match="image"):
        prepare([{"role": "user", "content": parts}], None, Style(), by_name("plain"))


def test_mistakes_are_named() -> None:
    with pytest.raises(BadRequest, match="robot"):
        prepare([{"role": "robot", "content": "x"}], None, Style(), by_name("plain"))
    with pytest.raises(BadRequest, match="function name"):
        bad = [{"role": "assistant", "tool_calls": [{"id": "1", "function": {}}]}]
        prepare(bad, None, Style(), by_name("plain"))
    assert plain_text(None, Style()) == ""


def test_an_assistant_message_can_be_continued() -> None:
    for text in ("Once upon ", "end", "a", ""):
        (last,) = open_ended([{"role": "assistant", "content": text}])
        rendered = f"<|im_start|>assistant\n{last['content']}<|im_end|>\n"
        assert cut(rendered) == f"<|im_start|>assistant\n{text.rstrip()}"
    with pytest.raises(BadRequest, match="continued"):
        cut("<|im_start|>assistant\n<|im_end|>\n")
    with pytest.raises(BadRequest, match="continued"):
        open_ended([{"role": "user", "content": "x"}])


def test_parts_of_an_assistant_message_can_be_continued() -> None:
    parts = [{"type": "thinking", "thinking": "t"}, {"type": "text", "text": "a "}]
    (last,) = open_ended([{"role": "assistant", "content": parts}])
    assert last["content"][0] == parts[0]
    assert cut(last["content"][1]["text"]) == "a"


_STRICT = (
    "{% set ns = namespace(last='') %}{% for m in messages %}"
    "{% if m.role == 'user' and ns.last in ('user', 'tool') %}{{ raise_exception('turns') }}"
    "{% endif %}{% set ns.last = m.role %}[{{ m.role }}]{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}"
    "{% endfor %}{% endfor %}"
)


def test_what_is_said_beside_results_where_nothing_may_follow_them() -> None:
    call = {"id": "1", "function": {"name": "f", "arguments": {}}}
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "r"},
        {"role": "user", "content": "and?"},
    ]
    strict = probe(ChatTemplate(_STRICT))
    assert not strict.said_after_results
    for style, last in ((strict, "r\n\nand?"), (Style(), "and?")):
        ready = prepare(messages, None, style, by_name("plain"))
        assert ready.messages[-1]["content"] == last


def test_a_template_that_keeps_one_system_message_gets_no_second() -> None:
    one = (
        "{% set ns = namespace(s='') %}{% for m in messages if m.role == 'system' %}"
        "{% set ns.s = m.content %}{% endfor %}{{ ns.s }}"
        "{% for m in messages if m.role != 'system' %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    )
    assert not probe(ChatTemplate(one)).late_system


def test_thinking_controls() -> None:
    assert thinking_controls("{% if enable_thinking %}").arguments(enabled=False) == {
        "enable_thinking": False
    }
    assert thinking_controls("{{ thinking_mode }}").arguments(True) == {"thinking_mode": "enabled"}
    effort = thinking_controls("{{ reasoning_effort }}")
    assert effort.arguments(effort="low") == {"reasoning_effort": "low"}
    assert thinking_controls("{% if thinking_budget %}").arguments(budget=7) == {
        "thinking_budget": 7
    }
    assert thinking_controls("{{ messages }}").arguments(True, "high", 5) == {}
    assert thinking_controls("x /no_think y").off_word == "/no_think"
    assert thinking_controls("{{ message.thinking }}").switch is None


def test_tools_in_words() -> None:
    assert "<tool_call>" in show_tools(by_name("plain"), SPECS)
    assert show_result(by_name("gemma-3"), "f", "1") == "```tool_output\n1\n```"
    assert "1" in show_result(by_name("plain"), "f", "1")


def test_what_a_template_changes_is_its_own_copy() -> None:
    template = ChatTemplate(
        "{{ messages.append(1) or messages | length }}{{ tools.pop() and 'x' }}"
    )
    messages, tools = [{"role": "user", "content": "q"}], [{"a": 1}]
    assert template.render(messages, tools=tools) == "2x"
    assert (messages, tools) == ([{"role": "user", "content": "q"}], [{"a": 1}])


def test_a_template_for_tools_gets_an_empty_list_without_any() -> None:
    template = ChatTemplate("{% for t in tools %}{{ t }}{% endfor %}{{ messages[0].content }}")
    assert template.render([{"role": "user", "content": "q"}]) == "q"
    assert ChatTemplate("{{ tools is none }}").render([]) == "True"


def test_a_model_with_two_templates_uses_the_one_for_tools_only_with_tools(
    tmp_path: Path, default_model: Path
) -> None:
    shutil.copy(default_model / "tokenizer.json", tmp_path)
    named = [
        {"name": "default", "template": "plain {{ messages[0].content }}"},
        {"name": "tool_use", "template": "{{ tools | tojson }} {{ messages[0].content }}"},
    ]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    dialect = Dialect(Tokenizer(tmp_path))
    asked = [{"role": "user", "content": "q"}]
    assert dialect.render(Conversation(asked)) == "plain q"
    tool = {"type": "function", "function": {"name": "probe", "parameters": {"type": "object"}}}
    assert "probe" in dialect.render(Conversation(asked, tools=[tool]))


GENEROUS = 20.0
"""Seconds for a linear pass on a busy machine; a quadratic one takes longer on any."""


def test_thousands_of_messages_are_merged_in_linear_time() -> None:
    text, many = "w" * 1000, 30_000
    strict = Style(alternate=True, said_after_results=False)
    users = [{"role": "user", "content": text}] * many
    began = time.monotonic()
    (merged,) = prepare(users, None, strict, by_name("plain")).messages
    assert merged["content"] == "\n\n".join([text] * many)
    result = {"role": "tool", "tool_call_id": "a", "content": text}
    (merged,) = prepare([result, *users], None, strict, by_name("plain")).messages
    assert merged["content"] == "\n\n".join([text] * (many + 1))
    assert time.monotonic() - began < GENEROUS


def test_texts_and_parts_are_merged_in_their_order() -> None:
    def user(content: Any) -> dict[str, Any]:
        return {"role": "user", "content": content}

    def merged(*contents: Any) -> Any:
        (found,) = _merged([user(content) for content in contents])
        return found["content"]

    def part(text: str) -> dict[str, Any]:
        return {"type": "text", "text": text}

    assert merged("a", "", "b") == "a\n\nb"
    assert merged("", "b") == "\n\nb"
    assert merged("a", "b", [part("c")], "d") == [part("a\n\nb\n\n"), part("c"), part("d")]
    assert merged([part("a")], "b", [part("c")]) == [part("a"), part("b"), part("c")]
    assert merged(None, "b") == [part("b")]


def test_thousands_of_calls_find_their_results_in_linear_time() -> None:
    many = 30_000
    function = {"name": "f", "arguments": "{}"}
    calls = [{"id": f"c{n}", "type": "function", "function": function} for n in range(many)]
    results = [
        {"role": "tool", "tool_call_id": f"c{n}", "content": str(n)} for n in reversed(range(many))
    ]
    began = time.monotonic()
    messages = [{"role": "assistant", "content": None, "tool_calls": calls}, *results]
    found = prepare(messages, None, Style(one_call=True), by_name("hermes")).messages
    assert [m["content"] for m in found if m["role"] == "tool"] == [str(n) for n in range(many)]
    assert time.monotonic() - began < GENEROUS
