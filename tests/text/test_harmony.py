"""Harmony against its authors' own parser, over generated conversations."""

from __future__ import annotations

import json
import os
import random
from typing import Any

import pytest
from test_formats_support import MATERIAL, SPECS, Answer, cut, fold, read

from millrace.text.formats import by_name

HARMONY = by_name("harmony")
PROMPT = "<|start|>user<|message|>hi<|end|><|start|>assistant"
WORDS = [
    "yes",
    "no,",
    "Zürich",
    "雪",
    "😀",
    "<b>",
    "a|b",
    "{",
    '"q"',
    "\n",
    "to=functions.x",
    "5 < 6",
]


def test_channels_without_the_oracle() -> None:
    text = (
        "<|channel|>analysis<|message|>Think hard.<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>I will look.<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json"
        '<|message|>{"city": "Bern"}<|call|>'
    )
    rng = random.Random(1)
    for _ in range(50):
        answer = fold(read(HARMONY, cut(text, rng), prompt=PROMPT))
        assert answer.reasoning == "Think hard."
        assert answer.content == "I will look."
        assert answer.calls == [("get_weather", {"city": "Bern"})]


def test_recipient_before_the_channel() -> None:
    text = " to=functions.ping<|channel|>commentary json<|message|>{}<|call|>"
    assert fold(read(HARMONY, [text], prompt=PROMPT)).calls == [("ping", {})]


def test_a_tool_nobody_offered_is_text_of_its_channel() -> None:
    text = (
        "<|channel|>analysis to=python code<|message|>print(1)<|call|>"
        "<|start|>assistant<|channel|>commentary to=functions.other <|constrain|>json"
        '<|message|>{"a": 1}<|call|>'
    )
    answer = fold(read(HARMONY, [text], prompt=PROMPT))
    assert answer.names == []
    assert answer.reasoning == "print(1)"
    assert answer.content == '{"a": 1}'


@pytest.mark.parametrize("size", range(0, 150, 2))
def test_a_cut_answer_leaks_no_header(size: int) -> None:
    text = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.get_weather <|constrain|>json<|message|>{"city": "Bern"}<|call|>'
    )
    answer = fold(read(HARMONY, [text[:size]], prompt=PROMPT, truncated=True))
    assert answer.content == ""
    assert "Hm.".startswith(answer.reasoning)


def test_text_without_any_header_is_content() -> None:
    assert fold(read(HARMONY, ["plain ", "text"])).content == "plain text"


def sentence(rng: random.Random) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, 12))).strip() or "x"


def generated(rng: random.Random, harmony: Any) -> list[Any]:
    found = []
    for _ in range(rng.randint(1, 5)):
        kind = rng.choice(["analysis", "commentary", "final", "call", "analysis-call", "python"])
        message = harmony.Message.from_role_and_content(harmony.Role.ASSISTANT, sentence(rng))
        if kind in ("analysis", "commentary", "final"):
            found.append(message.with_channel(kind))
            continue
        if kind == "python":
            found.append(message.with_channel("analysis").with_recipient("python"))
            continue
        arguments = json.dumps({"city": sentence(rng), "count": rng.randint(-5, 5)})
        message = harmony.Message.from_role_and_content(harmony.Role.ASSISTANT, arguments)
        name = rng.choice(["get_weather", "ping", "other.tool"])
        message = message.with_recipient(f"functions.{name}").with_content_type("<|constrain|>json")
        found.append(message.with_channel("analysis" if kind == "analysis-call" else "commentary"))
    return found


def expected(messages: list[Any]) -> Answer:
    """What the oracle's messages mean to a client."""
    answer = Answer()
    offered = {f"functions.{spec.name}": spec.name for spec in SPECS}
    for message in messages:
        text = "".join(part.text for part in message.content)
        if message.recipient in offered:
            answer.names.append(offered[message.recipient])
            answer.ids.append(f"call_{len(answer.ids)}")
            answer.arguments.append(text)
        elif message.channel == "analysis":
            answer.reasoning += text
        else:
            answer.content += text
    return answer


def squeezed(answer: Answer) -> tuple[Any, ...]:
    return (
        "".join(answer.content.split()),
        "".join(answer.reasoning.split()),
        answer.names,
        answer.arguments,
    )


def test_equal_to_the_oracle_on_200_conversations() -> None:
    harmony = pytest.importorskip("openai_harmony", reason="openai-harmony is not installed")
    folder = MATERIAL / "tiktoken"
    if not folder.is_dir():
        pytest.skip(f"no encoding in {folder}")
    os.environ.setdefault("TIKTOKEN_ENCODINGS_BASE", str(folder))
    encoding = harmony.load_harmony_encoding(harmony.HarmonyEncodingName.HARMONY_GPT_OSS)
    rng = random.Random(7)
    for _ in range(200):
        messages = generated(rng, harmony)
        tokens = encoding.render_conversation(
            harmony.Conversation.from_messages(messages),
            harmony.RenderConversationConfig(auto_drop_analysis=False),
        )
        text = encoding.decode(tokens)
        opening = "<|start|>assistant"
        assert text.startswith(opening)
        tail = encoding.encode(text.removeprefix(opening), allowed_special="all")
        oracle = encoding.parse_messages_from_completion_tokens(tail, harmony.Role.ASSISTANT)
        answer = fold(read(HARMONY, cut(text.removeprefix(opening), rng), prompt=PROMPT))
        assert squeezed(answer) == squeezed(expected(oracle))
