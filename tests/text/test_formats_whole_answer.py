"""Answers that are nothing but calls as JSON, bare or in a fence, in whatever family."""

from __future__ import annotations

import json

import pytest
from test_formats_support import SPECS, answer_to, read

from millrace.text.deltas import Content
from millrace.text.formats import OutputFormat, OutputParser, by_name, detect, names

BARE = '{"name": "get_weather", "arguments": {"city": "Bern"}}'
PING = '{"name": "ping", "arguments": {}}'
WEATHER = ("get_weather", {"city": "Bern"})
# The families that read bare JSON anywhere do so by rules of their own.
FORMATS = [by_name(name) for name in names() if name not in ("llama-3", "xlam")]
formats = pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)


def said(format: OutputFormat, text: str) -> tuple[str, str]:
    """The text as the family's content, and the prompt before it."""
    if format.messages is None:
        return text, ""
    return format.messages.message + text, format.primers[0]


@formats
@pytest.mark.parametrize(
    "text",
    [
        BARE,
        f"\n {BARE}\n",
        f"```json\n{BARE}\n```",
        f"```\n{BARE}\n```\n",
        f"[{BARE}]",
        BARE.replace('"arguments"', '"parameters"'),
        '{"arguments": {"city": "Bern"}, "name": "get_weather"}',
        '{"type": "function", "function": {"name": "get_weather", "arguments": "{\\"city\\": '
        '\\"Bern\\"}"}}',
        BARE[:-1],
        BARE[:-3],
    ],
)
def test_a_call_and_nothing_else(format: OutputFormat, text: str) -> None:
    written, prompt = said(format, text)
    answer = answer_to(format, written, prompt=prompt)
    assert (answer.content, answer.calls) == ("", [WEATHER])


@pytest.mark.parametrize(
    "text",
    [
        f"{BARE}\n{PING}",
        f"[{BARE}, {PING}]",
        f"```json\n{BARE}\n{PING}\n```",
        f"```json\n{BARE}\n```\n\n```json\n{PING}\n```",
        f"<think>Hm.</think>\n\n{BARE}, {PING}",
        f"{BARE}</tool_call>\n{PING}</tool_call><|im_end|>",
    ],
)
def test_several(text: str) -> None:
    format = detect("<tool_call> <think></think>", {"<|im_end|>"})
    answer = answer_to(format, text)
    assert (answer.content, answer.calls) == ("", [WEATHER, ("ping", {})])


@formats
@pytest.mark.parametrize(
    "text",
    [
        f"{BARE} is how one asks.",
        f"```json\n{BARE}\n```\nThat would be the call.",
        f"```json\n{BARE}\n``` {BARE} x",
        BARE.replace("get_weather", "get_time"),
        BARE.replace("get_weather", "Ann"),
        '{"name": "get_weather"}',
        '{"name": "get_weather", "arguments": {}, "why": "to know"}',
        '{"name": "get_weather", "arguments": 5}',
        '{"city": "Bern"}',
        '[1, 2, {"name": "ping"}]',
        "```json\n{}\n```",
        "```python\nprint(1)\n```",
        '{"name": "pi',
    ],
)
def test_what_is_not_only_a_call_is_content_unchanged(format: OutputFormat, text: str) -> None:
    written, prompt = said(format, text)
    answer = answer_to(format, written, prompt=prompt)
    assert (answer.content, answer.names) == (text, [])


@formats
def test_nothing_is_a_call_without_tools(format: OutputFormat) -> None:
    written, prompt = said(format, BARE)
    assert answer_to(format, written, None, prompt=prompt).content == BARE


def test_content_waits_no_longer_than_it_must() -> None:
    for text, shown in (
        ('{"n', False),
        ('{"name": "get_w', False),
        ('{"name": "get_x', True),
        ('{"city', False),
        ('{"city"', True),
        ("```py\n", False),
        ("```py\np", True),
        ("Hi", True),
        (BARE, False),
        (BARE + " x", True),
    ):
        pieces = OutputParser(by_name("hermes"), SPECS).feed(text)
        assert pieces == ([Content(text)] if shown else []), text


def test_a_limit_cuts_a_call_that_was_certain_and_leaves_other_text() -> None:
    hermes = by_name("hermes")
    answer = answer_to(hermes, BARE[:-5], truncated=True)
    assert (answer.content, answer.arguments) == ("", ['{"city": "Be'])
    answer = answer_to(hermes, '{"name": "get_wea', truncated=True)
    assert answer.content == '{"name": "get_wea'


def test_an_answer_that_the_prompt_began_is_no_call() -> None:
    parser = OutputParser(by_name("hermes"), SPECS)
    parser.prime(BARE[:20])
    assert parser.feed(BARE[20:]) + parser.finish() == [Content(BARE[20:])]


def test_a_long_answer_takes_time_by_its_length() -> None:
    text = json.dumps({"name": "get_weather", "arguments": {"city": "x" * 200_000}}) + " no"
    chunks = [text[i : i + 3] for i in range(0, len(text), 3)]
    assert (
        "".join(p.text for p in read(by_name("hermes"), chunks) if isinstance(p, Content)) == text
    )
