"""A broken call costs only itself: the next one is found, and no marker becomes content."""

from __future__ import annotations

import json
import random

import pytest
from test_formats_support import SPECS, Answer, answer_to, cut, fold, read

from millrace.text.formats import OutputFormat, OutputParser, by_name, names
from millrace.text.formats.call_encoder import Call, write_calls

FORMATS = [by_name(name) for name in names()]
formats = pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
FIRST = Call(
    "get_weather",
    {"city": "Bern", "opts": {"units": "c", "days": 3}, "count": 2, "tags": ["a", "zz9"]},
    "abcdefgh1",
)
SECOND = Call("get_weather", {"city": "Oslo"}, "abcdefgh2")
WANTED = ("get_weather", {"city": "Oslo"})
VARIANTS = 50


def prompt_for(format: OutputFormat) -> str:
    return format.primers[0] if format.messages is not None else ""


def broken(format: OutputFormat) -> list[str]:
    """Two calls, the first of which lacks something: a brace, a quote, a tag, a letter, its end."""
    both = write_calls(format, [FIRST, SECOND])
    begin, end = both.index("get_weather"), both.index("zz9") + 5
    if format.name == "pythonic":
        # Nothing but the tool's name tells such a list from any other.
        begin = both.index("(") + 1
    rng = random.Random(format.name)
    signs = [at for at in range(begin, end) if not both[at].isalnum()]
    rest = [at for at in range(begin, end) if both[at].isalnum()]
    rng.shuffle(signs)
    rng.shuffle(rest)
    found = [both[:at] + both[at + 1 :] for at in (signs + rest)[:VARIANTS]]
    alone = write_calls(format, [FIRST])
    after = write_calls(format, [SECOND])
    if has_opening(format):
        places = [alone.index("Bern") + at for at in (0, 2, 4, 6, 9, 13)]
        found += [alone[:place] + "\n" + after for place in places]
    for close in closing_marks(format):
        found.append(both.replace(close, "", 1))
        found.append(both.replace(close, close[:-1], 1))
    return [text for text in found if "Oslo" in text]


def has_opening(format: OutputFormat) -> bool:
    """Whether a second answer's calls begin with a mark that tells them from the first's."""
    return any(
        syntax.opens or (syntax.soft and not getattr(syntax, "soft_inside", False))
        for syntax in format.calls
    ) and not (format.messages or format.name in ("phi", "functools"))


def closing_marks(format: OutputFormat) -> set[str]:
    found: set[str] = set()
    for syntax in format.calls[:1]:
        found.update(syntax.closes, getattr(syntax, "value_closes", ()))
    return found - {""}


def check(format: OutputFormat, answer: Answer, text: str) -> None:
    assert WANTED in answer.calls, text
    assert all(isinstance(json.loads(arguments), dict) for arguments in answer.arguments)
    for marker in format.markers:
        assert marker not in answer.content, text


@formats
def test_the_call_after_a_broken_one_is_found(format: OutputFormat) -> None:
    variants = broken(format)
    assert len(variants) >= VARIANTS
    rng = random.Random(0)
    for text in variants:
        pieces = read(format, [text], prompt=prompt_for(format))
        check(format, fold(pieces), text)
        for chunks in (list(text), cut(text, rng), cut(text, rng, 40)):
            assert fold(read(format, chunks, prompt=prompt_for(format))) == fold(pieces), text


@pytest.mark.parametrize(
    "format", [f for f in FORMATS if f.thought is not None], ids=lambda format: format.name
)
def test_in_a_thought_too(format: OutputFormat) -> None:
    thought = format.thought
    assert thought is not None
    for text in broken(format)[::3]:
        opened = f"{thought.opens[0]}I will ask.\n{text}"
        answer = fold(read(format, list(opened)))
        check(format, answer, opened)
        assert answer.reasoning.startswith("I will ask.")
        assert fold(read(format, [opened])) == answer


@formats
def test_a_broken_call_leaves_what_is_said_around_it(format: OutputFormat) -> None:
    if format.messages is not None or not has_opening(format):
        pytest.skip("what is said is a message of its own, or nothing tells where a call ends")
    call = write_calls(format, [FIRST])
    for text in (call, call.replace("2", "2 x", 1)):
        answer = fold(read(format, list(f"Before.\n\n{text}\n\nAfter.")))
        assert answer.content.startswith("Before."), text
        assert answer.content.endswith("After."), text


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("qwen3-coder", "<tool_call>\n<function=get_weather>\n<parameter=city>\nBern\n"
         "<parameter=count>\n2\n</function>\n</tool_call>"),
        ("qwen3-coder", "<tool_call>\n<function=get_weather\n<parameter=city>Bern"
         "<parameter=count>2</parameter></tool_call>"),
        ("glm", "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Bern\n"
         "<arg_key>count</arg_key>\n<arg_value>2</tool_call>"),
        ("glm-4.7", "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Bern"
         "<arg_key>count</arg_key><arg_value>2</tool_call>"),
        ("minimax-m2", '<minimax:tool_call>\n<invoke name="get_weather">\n'
         '<parameter name="city">Bern\n<parameter name="count">2\n</invoke>\n'
         "</minimax:tool_call>"),
        ("seed-oss", "<seed:tool_call>\n<function=get_weather>\n<parameter=city>Bern"
         "<parameter=count>2</function>\n</seed:tool_call>"),
    ],
)  # fmt: skip
def test_a_value_without_its_end_ends_at_the_next_tag(family: str, text: str) -> None:
    answer = answer_to(by_name(family), text)
    assert (answer.content, answer.calls) == ("", [("get_weather", {"city": "Bern", "count": 2})])


@pytest.mark.parametrize(
    ("family", "value"),
    [
        (
            "qwen3-coder",
            "a </function> b <tool_call> and </tool_call> c <function=x> <parameter=y>",
        ),
        ("qwen3-coder", "<function=get_time>\n<parameter=zone> </function>\n as all know"),
        ("seed-oss", "<seed:tool_call> is a tag,\n</function>\n as all know"),
        ("minicpm5", "<function name=x> <param name=y> </param> z </function> <br>"),
        ("glm", "<tool_call>nobody\n <arg_key>x</arg_key> </tool_call> as all know"),
        ("minimax-m2", '<invoke name="x"> <parameter name="y"> </invoke> as all know'),
        ("deepseek-v4", "<｜DSML｜tool_calls> and </｜DSML｜invoke> as all know"),
        ("kimi-k3", "<|open|>tools<|sep|> and <|close|>call<|sep|> as all know"),
    ],
)
def test_a_value_may_hold_the_familys_own_tags(family: str, value: str) -> None:
    format = by_name(family)
    arguments = {"city": value, "count": 2}
    text = write_calls(format, [Call("get_weather", arguments), SECOND])
    answer = answer_to(format, text)
    assert (answer.content, answer.calls) == ("", [("get_weather", arguments), WANTED])


def test_a_string_may_hold_markers() -> None:
    value = 'Write <tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call> then <|im_end|>.'
    for family in ("hermes", "mistral", "kimi-k2", "deepseek-v3.1", "gemma-4", "nemotron"):
        marked = value + "".join(sorted(by_name(family).markers))
        text = write_calls(by_name(family), [Call("get_weather", {"city": marked})])
        assert answer_to(by_name(family), text).calls == [("get_weather", {"city": marked})]


@pytest.mark.parametrize("family", ["mistral", "hermes", "kimi-k2", "lfm2", "llama-3"])
def test_half_a_marker_is_never_content(family: str) -> None:
    format = by_name(family)
    for marker in sorted(format.markers):
        for size in range(max(3, (len(marker) + 1) // 2), len(marker) + 1):
            answer = answer_to(format, f"Hello{marker[:size]}")
            assert answer.content == "Hello", marker[:size]
    for text in ("a <", "x[", "</", "3 <t", "[1", "<|"):
        assert answer_to(format, text).content == text


def test_parts_of_a_header_are_never_content() -> None:
    texts = {
        "mistral": "Hi[ARGS]{}",
        "kimi-k2": "Hi<|tool_call_argument_begin|>{}<|tool_call_end|>",
        "deepseek-v3.1": "Hi<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
    }
    for family, text in texts.items():
        assert answer_to(by_name(family), text).content == "Hi{}"


@formats
def test_brackets_too_many_are_no_content(format: OutputFormat) -> None:
    text = write_calls(format, [SECOND])
    at = text.index("Oslo") + 4
    place = next((i for i in range(at, len(text)) if text[i] in "})"), None)
    if place is None:
        return
    doubled = text[:place] + text[place] + text[place:]
    answer = fold(read(format, list(doubled), prompt=prompt_for(format)))
    assert answer.calls == [WANTED]
    assert answer.content.strip("}])") == ""


@pytest.mark.parametrize(
    "repeated",
    [
        '<tool_call>{"name": "ping", "arguments": {"a": "',
        '<|tool_call_start|>[ping(a="',
        "<|tool_call_start|>[ping(a='x, b=",
        '<tool_call>{"name": "ping", "arguments": {"a": {"name": ',
        "[TOOL_CALLS]ping[ARGS]{",
        "<function=ping><parameter=a>",
        '{"name": "ping", "arguments": {',
        "```json\n",
    ],
)
def test_broken_calls_without_end_take_time_by_their_number(repeated: str) -> None:
    for family in ("hermes", "lfm2", "mistral", "qwen3-coder", "plain"):
        parser = OutputParser(by_name(family), SPECS)
        for _ in range(1500):
            parser.feed(repeated)
        parser.finish()
