"""Grammars, by what they let through: calls that parse and validate, and nothing else."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
from llguidance import LLMatcher, LLTokenizer
from test_formats_support import PING, fold, function, read
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from millrace.errors import BadRequest
from millrace.text.formats import OutputFormat, by_name, names, tool_from_openai
from millrace.text.formats.call_encoder import Call, write_calls
from millrace.text.formats.syntax import PythonCalls
from millrace.text.grammar import (
    Demand,
    answer_grammar,
    calls_grammar,
    calls_or_answer_grammar,
    from_schema,
    strict_grammar,
)
from millrace.text.tasks import FormTask, TextSide, TextSideConfig

FORMATS = [by_name(name) for name in names()]
formats = pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
END = "<|endoftext|>"
BOUNDED = tool_from_openai(
    function(
        "set_alarm",
        {
            "label": {"type": "string", "maxLength": 4},
            "hour": {"type": "integer", "minimum": 0, "maximum": 23},
            "loud": {"type": "boolean"},
            "day": {"enum": ["mon", "tue"]},
            "snooze": {"type": "array", "items": {"type": "integer"}, "maxItems": 2},
            "where": {
                "type": "object",
                "properties": {"room": {"type": "string", "enum": ["a", "b"]}},
                "required": ["room"],
                "additionalProperties": False,
            },
        },
        ["label", "hour", "where"],
    )
)
TOOLS = [BOUNDED, tool_from_openai(PING)]
ALARM = {"label": "up", "hour": 7, "where": {"room": "b"}}


class Vocabulary:
    """A tokenizer of single bytes, with some texts as special tokens."""

    def __init__(self, specials: list[str]) -> None:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens([AddedToken(text, special=True) for text in [END, *specials]])
        ids = tokenizer.get_vocab()
        self.tokens: Mapping[str, int] = {text: ids[text] for text in specials}
        self._tokenizer = tokenizer
        self.end = ids[END]
        self.guide = LLTokenizer(tokenizer.to_str(), eos_token=self.end)

    def accepts(self, grammar: str, text: str) -> bool:
        matcher = self.matcher(grammar)
        tokens = self.guide.tokenize_str(text, parse_special=True)
        consumed: int = matcher.try_consume_tokens(tokens)
        return consumed == len(tokens) and bool(matcher.is_accepting())

    def matcher(self, grammar: str) -> Any:
        matcher = LLMatcher(self.guide, grammar)
        assert not matcher.is_error(), matcher.get_error()
        return matcher

    def walk(self, grammar: str, rng: random.Random, limit: int = 3000) -> str:
        """A random answer that the grammar allows, up to its end."""
        matcher = self.matcher(grammar)
        found: list[int] = []
        while not matcher.is_stopped() and len(found) < limit:
            bias = matcher.compute_logit_bias()
            allowed = [token for token, value in enumerate(bias) if value]
            ends = matcher.is_accepting() and rng.random() < 0.5
            token = self.end if ends else rng.choice(allowed)
            if token == self.end:
                break
            assert matcher.consume_token(token)
            found.append(token)
        assert len(found) < limit
        return str(self._tokenizer.decode(found, skip_special_tokens=False))


def specials(format: OutputFormat) -> list[str]:
    """The family's markers that a vocabulary would hold as special tokens."""
    found: set[str] = set()
    for marker in format.markers:
        parts = re.findall(r"<\|[^|<>\s]+\|>", marker)
        if len(parts) > 1:
            found.update(parts)
        elif re.fullmatch(r"[<\[]\S+[>\]]", marker):
            found.add(marker)
    return sorted(found)


def prompt_for(format: OutputFormat) -> str:
    return format.primers[0] if format.messages is not None else ""


def written(format: OutputFormat, calls: list[Call]) -> str:
    text = write_calls(format, calls)
    if any(isinstance(syntax, PythonCalls) for syntax in format.calls[:1]):
        for value in ("'up'", "'b'", "'room'"):
            text = text.replace(value, value.replace("'", '"'))
    return text


@formats
@pytest.mark.parametrize("as_tokens", [True, False], ids=["tokens", "text"])
def test_calls_in_the_familys_markup_and_no_others(format: OutputFormat, as_tokens: bool) -> None:
    vocabulary = Vocabulary(specials(format) if as_tokens else [])
    alarm, ping = Call("set_alarm", ALARM, "abcdefgh1"), Call("ping", {}, "abcdefgh2")
    many = calls_grammar(format, TOOLS, vocabulary.tokens)
    one = calls_grammar(format, TOOLS, vocabulary.tokens, parallel=False)
    named = calls_grammar(format, TOOLS, vocabulary.tokens, name="ping", parallel=False)
    single = written(format, [alarm])
    assert vocabulary.accepts(many, single)
    assert vocabulary.accepts(one, single)
    assert not vocabulary.accepts(named, single)
    assert vocabulary.accepts(named, written(format, [ping]))
    if format.messages is None and format.name != "gigachat":
        both = written(format, [alarm, ping])
        assert vocabulary.accepts(many, both)
        assert not vocabulary.accepts(one, both)
    for wrong in (
        Call("set_alarm", {"label": "up", "where": {"room": "b"}}, "abcdefgh1"),
        Call("set_alarm", {**ALARM, "hour": 99}, "abcdefgh1"),
        Call("set_alarm", {**ALARM, "extra": 1}, "abcdefgh1"),
        Call("nobody", {}, "abcdefgh1"),
    ):
        assert not vocabulary.accepts(many, written(format, [wrong]))
    assert not vocabulary.accepts(many, "Hello.")
    assert not vocabulary.accepts(many, "")


@formats
def test_whatever_the_grammar_allows_parses_and_validates(format: OutputFormat) -> None:
    vocabulary = Vocabulary(specials(format))
    schemas = {tool.name: {**tool.parameters} for tool in TOOLS}
    grammar = calls_grammar(format, TOOLS, vocabulary.tokens)
    rng = random.Random(format.name)
    for _ in range(12):
        text = vocabulary.walk(grammar, rng)
        answer = fold(read(format, [text], TOOLS, prompt=prompt_for(format)))
        assert answer.names, text
        assert answer.content == ""
        for name, arguments in answer.calls:
            jsonschema.validate(arguments, schemas[name])


@pytest.mark.parametrize(
    "format", [f for f in FORMATS if f.thought is not None], ids=lambda format: format.name
)
def test_a_thought_comes_first(format: OutputFormat) -> None:
    thought = format.thought
    assert thought is not None
    vocabulary = Vocabulary(specials(format))
    entry = from_schema({"type": "object", "required": ["a"]}, "schema")
    body = '{"a": 1}'
    closed = f"Hm {{}}\n{thought.closes[0]}\n\n{body}"
    inside = answer_grammar(entry, format, vocabulary.tokens, "inside")
    may = answer_grammar(entry, format, vocabulary.tokens, "may")
    plain = answer_grammar(entry, format, vocabulary.tokens, "no")
    assert vocabulary.accepts(inside, closed)
    assert not vocabulary.accepts(inside, f"Hm {thought.closes[0]}no json")
    assert vocabulary.accepts(may, thought.opens[0] + closed)
    assert vocabulary.accepts(may, body)
    assert vocabulary.accepts(plain, body)
    assert not vocabulary.accepts(plain, thought.opens[0] + closed)
    calls = calls_grammar(format, TOOLS, vocabulary.tokens, thinking="may")
    text = written(format, [Call("ping", {}, "abcdefgh1")])
    assert vocabulary.accepts(calls, f"{thought.opens[0]}Hm.{thought.closes[0]}\n{text}")
    assert vocabulary.accepts(calls, text)


def test_harmony_thinks_then_answers_in_form() -> None:
    format = by_name("harmony")
    vocabulary = Vocabulary(specials(format))
    integer = from_schema({"type": "integer"}, "s")
    grammar = answer_grammar(integer, format, vocabulary.tokens, "may")
    final = "<|channel|>final<|message|>12"
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    assert vocabulary.accepts(grammar, final)
    assert vocabulary.accepts(grammar, thought + thought + final)
    assert not vocabulary.accepts(grammar, "<|channel|>final<|message|>x")
    both = calls_or_answer_grammar(integer, format, TOOLS, vocabulary.tokens, thinking="may")
    call = "<|channel|>commentary to=functions.ping <|constrain|>json<|message|>{}<|call|>"
    assert vocabulary.accepts(both, thought + call)
    assert vocabulary.accepts(both, thought + final)


@formats
def test_tools_and_a_form_together(format: OutputFormat) -> None:
    if format.messages is not None:
        pytest.skip("shown above for Harmony")
    vocabulary = Vocabulary(specials(format))
    entry = from_schema({"type": "object", "required": ["a"]}, "schema")
    grammar = calls_or_answer_grammar(entry, format, TOOLS, vocabulary.tokens)
    assert vocabulary.accepts(grammar, '{"a": 1}')
    call = written(format, [Call("ping", {}, "abcdefgh1")])
    if format.name == "llama-3":
        call = "<|python_tag|>" + call
    assert vocabulary.accepts(grammar, call)
    assert not vocabulary.accepts(grammar, "Hello.")


@formats
def test_strict_tools_once_a_call_opens(format: OutputFormat) -> None:
    strict = [type(TOOLS[0])("set_alarm", BOUNDED.parameters, "", True), *TOOLS[1:]]
    vocabulary = Vocabulary(specials(format))
    assert strict_grammar(format, TOOLS, vocabulary.tokens) is None
    try:
        lazy = strict_grammar(format, strict, vocabulary.tokens)
    except BadRequest as error:
        assert "strict" in error.message.lower()
        assert format.name in ("pythonic", "functionary-v3.2")
        return
    assert lazy is not None
    trigger = lazy.triggers[0]
    good = written(format, [Call("set_alarm", ALARM, "abcdefgh1")])
    bad = written(format, [Call("set_alarm", {**ALARM, "hour": 99}, "abcdefgh1")])
    rest = good.partition(trigger)[2]
    assert rest
    matcher = vocabulary.matcher(lazy.grammar)
    tokens = vocabulary.guide.tokenize_str(rest, parse_special=True)
    count = matcher.try_consume_tokens(tokens)
    assert matcher.is_accepting() or count == len(tokens)
    assert not vocabulary.accepts(lazy.grammar, bad.partition(trigger)[2])


@formats
def test_schemas_that_refer_to_themselves(format: OutputFormat) -> None:
    node = {
        "type": "object",
        "properties": {
            "kind": {"enum": ["leaf", "tree"]},
            "kids": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
        },
        "required": ["kind"],
        "additionalProperties": False,
    }
    tool = type(BOUNDED)(
        "plant",
        {
            "type": "object",
            "properties": {"root": {"$ref": "#/$defs/node"}},
            "required": ["root"],
            "$defs": {"node": node},
        },
    )
    vocabulary = Vocabulary(specials(format))
    grammar = calls_grammar(format, [tool], vocabulary.tokens, parallel=False)
    value = {"root": {"kind": "tree", "kids": [{"kind": "leaf"}]}}
    text = written(format, [Call("plant", value, "abcdefgh1")]).replace("'", '"')
    assert vocabulary.accepts(grammar, text)
    assert fold(read(format, [text], [tool], prompt=prompt_for(format))).calls == [("plant", value)]


def test_a_prompt_that_opens_the_first_call() -> None:
    vocabulary = Vocabulary([])
    format = by_name("functionary-v3.2")
    grammar = calls_grammar(format, TOOLS, {}, prompt="assistant\n\n>>>")
    calls = written(format, [Call("ping", {}), Call("ping", {})])
    assert vocabulary.accepts(grammar, calls.removeprefix(">>>"))
    assert not vocabulary.accepts(grammar, calls)


def test_tool_choice_mistakes() -> None:
    hermes = by_name("hermes")
    with pytest.raises(BadRequest, match="nobody"):
        calls_grammar(hermes, TOOLS, {}, name="nobody")
    with pytest.raises(BadRequest, match="no tools"):
        calls_grammar(hermes, [], {})
    odd = tool_from_openai(function("odd", {"a": {"type": "array", "uniqueItems": True}}))
    with pytest.raises(BadRequest, match="uniqueItems"):
        calls_grammar(hermes, [odd], {})


def test_what_a_vocabulary_cannot_spell_is_refused(default_model: Path) -> None:
    side = TextSide(TextSideConfig(folder=str(default_model), window=512))
    rare = "\U000766fd"  # its first byte is no token of this vocabulary
    for demand in (
        Demand("choice", ["yes", f"no{rare}"], "guided_choice"),
        Demand("schema", {"type": "object", "properties": {"a": {"const": rare}}}, "guided_json"),
    ):
        with pytest.raises(BadRequest, match="cannot spell"):
            FormTask(demand).run(side)
    noted = {"type": "object", "description": rare}
    assert FormTask(Demand("schema", noted, "guided_json")).run(side)
    assert FormTask(Demand("choice", ["ja", "né", "是", "😀"], "guided_choice")).run(side)


def test_a_schema_that_nothing_satisfies_is_refused_in_words(default_model: Path) -> None:
    side = TextSide(TextSideConfig(folder=str(default_model), window=512))
    for schema in ({"$ref": "#"}, {"anyOf": [{"$ref": "#"}]}):
        with pytest.raises(BadRequest, match="nothing that is finite satisfies it"):
            FormTask(Demand("schema", schema, "guided_json")).run(side)
