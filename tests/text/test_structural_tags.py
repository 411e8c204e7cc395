"""Structural tags as grammars: what follows one is accepted to the end, all else is not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher
from tokenizers import Tokenizer

from millrace.engine.matching import load_tokenizer
from millrace.errors import BadRequest
from millrace.text.grammar.structural import structural_grammar

MARKERS = {"<|im_start|>": 1, "<|im_end|>": 2}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
CONTENT = {"type": "json_schema", "json_schema": SCHEMA}
TAG = {"type": "tag", "begin": "<tool>", "content": CONTENT, "end": "</tool>"}
CALL, OTHER, WRONG = (f'<tool>{{"{key}": {n}}}</tool>' for key, n in (("a", 1), ("a", 2), ("b", 1)))
TRIGGERED = {"type": "triggered_tags", "triggers": ["<tool>"], "tags": [TAG]}
TEXT = {"type": "any_text"}
START = {"type": "const_string", "value": "<|im_start|>"}
Accepts = Callable[[Any, str], bool]


@pytest.fixture(scope="module")
def accepts(default_model: Path) -> Accepts:
    vocabulary = load_tokenizer(default_model)
    tokenizer = Tokenizer.from_file(str(default_model / "tokenizer.json"))

    def judge(format: Any, text: str) -> bool:
        grammar = structural_grammar(_tag(format), MARKERS, "structural_tag")
        matcher = LLMatcher(vocabulary, grammar)
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        return matcher.try_consume_tokens(ids) == len(ids) and bool(matcher.is_accepting())

    return judge


def _tag(format: Any) -> str:
    return json.dumps({"type": "structural_tag", "format": format})


@pytest.mark.parametrize(
    ("format", "right", "wrong"),
    [
        ({"type": "const_string", "value": "hi there"}, ["hi there"], ["hi", "ho"]),
        (CONTENT, ['{"a": 1}'], ['{"b": 1}', "no"]),
        ({"type": "regex", "pattern": "[0-9]+"}, ["12"], ["x"]),
        ({"type": "grammar", "grammar": 'root ::= "yes" | "no"'}, ["yes"], ["maybe"]),
        ({"type": "or", "elements": [TAG, {"type": "const_string", "value": "no"}]}, [CALL, "no"], ["x"]),
        (TAG, [CALL], [WRONG, f"{CALL} x", f"x {CALL}"]),
        ({"type": "sequence", "elements": [TEXT, TAG]}, [CALL, f"well, {CALL}"], ["well", WRONG]),
        ({"type": "sequence", "elements": [TEXT, TAG, TEXT]}, [f"a {CALL} b"], ["a b"]),
        ({"type": "sequence", "elements": [TEXT, START, CONTENT]},
         ['hm <|im_start|>{"a": 1}'], ["hm"]),
        ({"type": "plus", "content": TAG}, [CALL, CALL + OTHER], [""]),
        ({"type": "optional", "content": TAG}, ["", CALL], [CALL + OTHER]),
        (TRIGGERED, ["plain", f"x {CALL} y", CALL + OTHER], [f"x {WRONG}", "x <tool>junk"]),
        (TRIGGERED | {"at_least_one": True}, [f"x {CALL}", CALL + OTHER], ["plain", WRONG]),
        (TRIGGERED | {"stop_after_first": True}, ["plain", f"x {CALL}"], [CALL + OTHER, WRONG]),
        (TRIGGERED | {"at_least_one": True, "stop_after_first": True},
         [f"x {CALL}"], ["plain", CALL + OTHER]),
        ({"type": "tags_with_separator", "tags": [TAG], "separator": "\n", "at_least_one": True},
         [CALL, f"{CALL}\n{OTHER}"], ["", CALL + OTHER]),
        ({"type": "triggered_tags", "triggers": ["<a>", "<b>"], "at_least_one": True, "tags": [
            {"begin": "<a>1", "content": TEXT, "end": "</a>"},
            {"begin": "<b>", "content": {"type": "regex", "pattern": "[0-9]+"}, "end": ["</b>", "</c>"]},
         ]}, ["<a>1 foo</a>", "t <b>12</c> z"], ["<b>x</b>", "<a>2</a>", "zz"]),
    ],
)  # fmt: skip
def test_a_tag_is_enforced(
    accepts: Accepts, format: Any, right: list[str], wrong: list[str]
) -> None:
    assert [text for text in right if not accepts(format, text)] == []
    assert [text for text in wrong if accepts(format, text)] == []


def test_the_form_before_this_one_is_understood(accepts: Accepts) -> None:
    old = {
        "structures": [{"begin": "<tool>", "schema": SCHEMA, "end": "</tool>"}],
        "triggers": ["<tool>"],
    }
    assert structural_grammar(json.dumps(old), MARKERS, "tag") == structural_grammar(
        _tag(TRIGGERED), MARKERS, "tag"
    )


@pytest.mark.parametrize(
    "tag",
    [
        "", "{", "[]", "3", "{}", _tag(None), _tag({}), _tag({"type": "nothing"}), _tag({"type": []}),
        _tag({"type": "sequence", "elements": []}), _tag({"type": "sequence", "elements": {}}),
        _tag({"type": "tag", "begin": 1, "content": TEXT, "end": ""}),
        _tag({"type": "tag", "begin": "", "content": TEXT}),
        _tag({"type": "triggered_tags", "triggers": [""], "tags": [TAG]}),
        _tag({"type": "triggered_tags", "triggers": ["<other>"], "tags": [TAG]}),
        _tag({"type": "json_schema", "json_schema": {"type": "nothing"}}),
        _tag({"type": "json_schema", "json_schema": {}, "style": "qwen_xml"}),
        _tag({"type": "regex", "pattern": "("}), _tag({"type": "any_text", "excludes": ["x"]}),
        "[" * 100_000,
    ],
    ids=range(20),
)  # fmt: skip
def test_what_cannot_be_enforced_is_refused(tag: str) -> None:
    with pytest.raises(BadRequest):
        structural_grammar(tag, MARKERS, "structural_tag")


def test_deep_nesting_is_refused() -> None:
    format: Any = TEXT
    for _ in range(100):
        format = {"type": "star", "content": format}
    with pytest.raises(BadRequest):
        structural_grammar(_tag(format), MARKERS, "structural_tag")
