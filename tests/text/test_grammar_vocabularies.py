"""The grammars over real vocabularies, where markers are special tokens and words are long."""

from __future__ import annotations

import json
import random
import zipfile
from pathlib import Path

import jsonschema  # type: ignore[import-untyped]
import pytest
from llguidance import LLMatcher, LLTokenizer
from test_formats_support import MATERIAL, fold, read
from test_grammar import ALARM, TOOLS, prompt_for, written

from millrace.text.formats import by_name
from millrace.text.formats.call_encoder import Call
from millrace.text.grammar import calls_grammar

PAIRS = [
    ("qwen3", "hermes"),
    ("qwen3.5", "qwen3-coder"),
    ("llama3.2", "llama-3"),
    ("mistral-nemo", "mistral-list"),
    ("deepseek-v3.1", "deepseek-v3.1"),
    ("deepseek-v4", "deepseek-v4"),
    ("minimax-m2", "minimax-m2"),
    ("glm-4.7-flash", "glm-4.7"),
    ("gpt-oss-built", "harmony"),
    ("gemma3", "gemma-3"),
    ("smollm2", "plain"),
]


@pytest.mark.parametrize(("vocabulary", "family"), PAIRS)
def test_calls_are_enforced(vocabulary: str, family: str, tmp_path: Path) -> None:
    archive = MATERIAL / "tokenizers" / f"{vocabulary}.zip"
    if not archive.is_file():
        pytest.skip(f"no tokenizer at {archive}")
    with zipfile.ZipFile(archive) as opened:
        source = opened.read("tokenizer.json").decode()
    guide = LLTokenizer(source)
    added = {token["content"]: token["id"] for token in json.loads(source)["added_tokens"]}
    tokens = {text: number for text, number in added.items() if guide.is_special_token(number)}
    format = by_name(family)
    grammar = calls_grammar(format, TOOLS, tokens)
    text = written(format, [Call("set_alarm", ALARM, "abcdefgh1")])
    matcher = LLMatcher(guide, grammar)
    ids = guide.tokenize_str(text, parse_special=True)
    assert matcher.try_consume_tokens(ids) == len(ids)
    assert matcher.is_accepting()
    schemas = {tool.name: dict(tool.parameters) for tool in TOOLS}
    rng = random.Random(1)
    for _ in range(2):
        answer = fold(read(format, [walk(guide, grammar, rng)], TOOLS, prompt=prompt_for(format)))
        assert answer.names
        assert answer.content == ""
        for name, arguments in answer.calls:
            jsonschema.validate(arguments, schemas[name])


def walk(guide: LLTokenizer, grammar: str, rng: random.Random) -> str:
    matcher = LLMatcher(guide, grammar)
    found = b""
    for _ in range(600):
        if matcher.is_stopped() or (matcher.is_accepting() and rng.random() < 0.5):
            break
        bias = matcher.compute_logit_bias()
        token = rng.choice([i for i in range(guide.vocab_size) if bias[i]])
        if token == guide.eos_token:
            break
        assert matcher.consume_token(token)
        piece = guide.decode_bytes([token])
        found += piece[1:] if guide.is_special_token(token) and piece[:1] == b"\xff" else piece
    return found.decode(errors="replace")
