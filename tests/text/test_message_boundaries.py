"""Borders stand where the next prompt parts from this one, whatever the template does to the past."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from millrace.text.conversation import Conversation
from millrace.text.dialect import Dialect
from millrace.text.message_boundaries import borders, boundaries, opening
from millrace.text.tokenizer import Tokenizer
from millrace.text.volatile import Volatile

Said = list[dict[str, Any]]

FORGETFUL = """{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.reasoning_content and loop.index0 > ns.last %}<think>{{ m.reasoning_content }}</think>{% endif %}
{{- m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
<think>{% endif %}"""
"""Earlier thoughts are dropped, and an answer begins inside one."""

TOOLS_LAST = """{%- for m in messages %}
{%- if loop.last and tools %}[TOOLS]{{ tools | tojson }}[/TOOLS]{% endif %}[{{ m.role }}]{{ m.content }}
{%- endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"""
"""The tools stand before the last message, so that they move with every turn."""

SYSTEM_LAST = """{%- set ns = namespace(last=-1, system='') %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- if m.role == 'system' %}{% set ns.system = m.content %}{% endif %}{% endfor %}
{%- for m in messages if m.role != 'system' %}
{%- if m == messages[ns.last] %}{% if tools %}[TOOLS]{{ tools | tojson }}[/TOOLS]{% endif %}[user]
{{- ns.system }} {{ m.content }}{% else %}[{{ m.role }}]{{ m.content }}{% endif %}
{%- endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"""
"""The system message does, too."""

STRICT = """{%- if messages[-1].role != 'user' %}{{ raise_exception('a user must speak last') }}{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

FOLDED = """{%- if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""A system message is a part of the first user's."""

TOOL = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {}}},
}


@pytest.fixture
def speak(default_model: Path, tmp_path: Path) -> Callable[..., Speaker]:
    """The default tokenizer under a template of the test's own."""

    def make(template: str | None = None, *patterns: str) -> Speaker:
        for file in default_model.glob("tokenizer*.json"):
            shutil.copy(file, tmp_path)
        if template is not None:
            (tmp_path / "chat_template.jinja").write_text(template)
        tokenizer = Tokenizer(tmp_path)
        return Speaker(tokenizer, Dialect(tokenizer, volatile=Volatile(patterns)))

    return make


class Speaker:
    def __init__(self, tokenizer: Tokenizer, dialect: Dialect) -> None:
        self.tokenizer = tokenizer
        self.dialect = dialect

    def prompt(self, chat: Conversation) -> tuple[list[int], list[int]]:
        text = self.dialect.render(chat)
        tokens, ends = self.tokenizer.encode_placed(text)
        assert tokens == self.tokenizer.encode(text)
        return tokens, boundaries(self.dialect, chat, text, ends)

    def texts(self, chat: Conversation) -> list[str]:
        """What comes before each boundary."""
        tokens, places = self.prompt(chat)
        return [self.tokenizer.decode(tokens[:p], skip_special=False) for p in places]

    def shared(self, one: Conversation, other: Conversation) -> tuple[int, int]:
        """How many tokens two prompts begin with alike, and the boundary that serves them best."""
        (first, places), (second, _) = self.prompt(one), self.prompt(other)
        common = next(
            (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b),
            min(len(first), len(second)),
        )
        return common, max((p for p in places if p <= common), default=0)


def _said(*turns: str) -> Said:
    """A conversation of user and assistant by turns."""
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]


SYSTEM = {"role": "system", "content": "You are a miller. Größe: 水 🌊."}


def test_ends_of_messages(speak: Callable[..., Speaker]) -> None:
    speaker = speak()
    chat = Conversation([SYSTEM, *_said("Grüß Gott, 世界 🙂🏽", "Hallo 👋", "Was gibt's?")])
    head = f"<|im_start|>system\n{SYSTEM['content']}<|im_end|>\n"
    first = f"{head}<|im_start|>user\nGrüß Gott, 世界 🙂🏽<|im_end|>\n"
    second = f"{first}<|im_start|>assistant\nHallo 👋<|im_end|>\n"
    third = f"{second}<|im_start|>user\nWas gibt's?<|im_end|>\n"
    assert speaker.texts(chat) == [f"{head}<|im_start|>user\n", first, second, third]


def test_a_long_conversation_has_few(speak: Callable[..., Speaker]) -> None:
    speaker = speak()
    chat = Conversation([SYSTEM, *_said(*[f"words {i}" for i in range(41)])])
    tokens, places = speaker.prompt(chat)
    assert len(places) <= 5
    assert places[0] < 40 and all(p > len(tokens) - 60 for p in places[1:])


def test_the_next_turn_goes_on_from_the_last(speak: Callable[..., Speaker]) -> None:
    speaker = speak()
    chat = Conversation([SYSTEM, *_said("one", "two", "three")])
    after = replace(chat, messages=[*chat.messages, *_said("four", "five")[::-1]])
    common, best = speaker.shared(chat, after)
    assert common - best <= 4


def test_a_template_that_drops_thoughts(speak: Callable[..., Speaker]) -> None:
    speaker = speak(FORGETFUL)
    chat = Conversation(
        [
            SYSTEM,
            {"role": "user", "content": "How high is the wheel?"},
            {"role": "assistant", "content": "I look.", "reasoning_content": "It may be high."},
            {"role": "tool", "content": "nine feet"},
            {"role": "assistant", "content": "Nine.", "reasoning_content": "So it is nine."},
            {"role": "tool", "content": "and a half"},
        ]
    )
    more = _said("And how wide?")
    answer = {"role": "assistant", "content": "Nine and a half."}
    after = replace(chat, messages=[*chat.messages, answer, *more])
    common, best = speaker.shared(chat, after)
    # What is shared ends before the first thought, far from the last messages.
    assert common < 45 and best == common


def test_a_generation_prompt_that_is_no_history(speak: Callable[..., Speaker]) -> None:
    speaker = speak(FORGETFUL)
    chat = Conversation(_said("Hello there"))
    after = replace(chat, messages=_said("Hello there", "Good day", "Well?"))
    common, best = speaker.shared(chat, after)
    assert best == common == len(speaker.prompt(chat)[0]) - len(speaker.tokenizer.encode("<think>"))


def test_a_template_that_moves_its_tools(speak: Callable[..., Speaker]) -> None:
    speaker = speak(TOOLS_LAST)
    chat = Conversation(_said("first", "second", "third"), tools=[TOOL])
    after = replace(chat, messages=_said("first", "second", "third", "fourth", "fifth"))
    common, best = speaker.shared(chat, after)
    assert 0 < best == common


def test_a_template_that_refuses_prefixes(speak: Callable[..., Speaker]) -> None:
    speaker = speak(STRICT)
    texts = speaker.texts(Conversation([SYSTEM, *_said("one", "two", "three")]))
    assert texts[0].endswith("<|im_start|>user\n") and SYSTEM["content"] in texts[0]
    assert texts[-1].endswith("three<|im_end|>\n")


def test_a_system_message_inside_the_first_users(speak: Callable[..., Speaker]) -> None:
    speaker = speak(FOLDED)
    one, other = (Conversation([SYSTEM, *_said(words)]) for words in ("Why?", "Because."))
    common, best = speaker.shared(one, other)
    assert best == common
    assert opening(speaker.dialect, one).endswith(f"{SYSTEM['content']}\n\n")


def test_an_answer_to_be_continued(speak: Callable[..., Speaker]) -> None:
    speaker = speak()
    chat = Conversation([SYSTEM, *_said("one", "It was")], continue_final=True)
    assert speaker.texts(chat)[-1].endswith("one<|im_end|>\n")


def test_what_comes_before_any_user(speak: Callable[..., Speaker]) -> None:
    speaker = speak()
    chat = Conversation([SYSTEM])
    assert opening(speaker.dialect, chat).endswith("<|im_end|>\n<|im_start|>user\n")


def test_volatile_lines_are_no_part_of_the_prompt(speak: Callable[..., Speaker]) -> None:
    speaker = speak(None, "auto", r"^Session \d+$")
    system = "You are kind.\nToday's date: 2025-01-01\nSession 17\nBe brief."

    def at(date: str, session: int) -> Conversation:
        text = system.replace("2025-01-01", date).replace("17", str(session))
        return Conversation(
            [{"role": "system", "content": text}, *_said("Hi, Session 3\nSession 3")]
        )

    chat = at("2025-01-01", 17)
    assert speaker.prompt(chat) == speaker.prompt(at("2031-12-09", 4))
    text = speaker.dialect.render(chat)
    assert "You are kind.\nBe brief." in text and "\nSession 3" in text
    assert speaker.dialect.stripped(chat) == 2


def _between(speaker: Speaker, *messages: dict[str, Any], **more: Any) -> tuple[str, str | None]:
    """What always stays of a prompt: before the border of its head, and from that of its tail on."""
    chat = Conversation(list(messages), **more)
    text = speaker.dialect.render(chat)
    tokens, ends = speaker.tokenizer.encode_placed(text)
    head, tail = borders(speaker.dialect, chat, text, ends)
    parts = tokens[:head], None if tail is None else tokens[tail:]
    before, after = (p and speaker.tokenizer.decode(p, skip_special=False) for p in parts)
    return before or "", after


def _message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def test_system_tools_and_the_last_message_are_never_left_out(
    speak: Callable[..., Speaker],
) -> None:
    speaker = speak()
    long = "many words " * 40
    said = [_message("user", long), _message("assistant", long), _message("user", "And now?")]
    head, tail = _between(speaker, SYSTEM, *said)
    assert head == f"<|im_start|>system\n{SYSTEM['content']}<|im_end|>\n<|im_start|>user\n"
    assert tail == "<|im_start|>user\nAnd now?<|im_end|>\n<|im_start|>assistant\n"


def test_results_of_tools_are_part_of_the_last_message(speak: Callable[..., Speaker]) -> None:
    speaker = speak()
    results = [_message("tool", "one " * 200), _message("tool", "two " * 200)]
    asked = [_message("user", "Look."), _message("assistant", "I look.")]
    _, tail = _between(speaker, SYSTEM, *asked, *results)
    assert tail is not None and tail.count("one") == tail.count("two") == 200
    _, tail = _between(speaker, SYSTEM, *asked, *results, _message("user", "And?"))
    assert tail is not None and tail.count("one") == 200 and "And?" in tail
    assert _between(speaker, *results)[1] is not None, "nor where they are all there is"


def test_a_users_message_that_is_nearly_all_may_be_cut(speak: Callable[..., Speaker]) -> None:
    speaker = speak()
    assert _between(speaker, SYSTEM, _message("user", "long " * 500))[1] is None
    more = [_message("user", "Hi."), _message("assistant", "Hi."), _message("user", "long " * 500)]
    assert _between(speaker, SYSTEM, *more)[1] is None


@pytest.mark.parametrize("template", [FORGETFUL, TOOLS_LAST, STRICT, FOLDED])
def test_templates_of_any_kind_leave_the_last_words_in_the_tail(
    speak: Callable[..., Speaker], template: str
) -> None:
    speaker = speak(template)
    said = [_message("user", "long " * 90), _message("assistant", "Yes."), _message("user", "End?")]
    _, tail = _between(speaker, *said, tools=[TOOL["function"]])
    assert tail is not None and "End?" in tail and tail.count("long") < 32


@pytest.mark.parametrize("last", ["End?", "end " * 200])
def test_tools_and_a_system_prompt_that_stand_further_down_stay(
    speak: Callable[..., Speaker], last: str
) -> None:
    speaker = speak(SYSTEM_LAST)
    said = [_message("user", "long " * 90), _message("assistant", "Yes."), _message("user", last)]
    head, tail = _between(speaker, SYSTEM, *said, tools=[TOOL["function"]])
    assert tail is not None and "long" not in head + tail
    assert tail.index("TOOLS]") < tail.index(SYSTEM["content"]) < tail.index(last.strip())
    results = [_message("assistant", "I look."), _message("tool", "found " * 90)]
    head, tail = _between(speaker, SYSTEM, *said, *results, tools=[TOOL["function"]])
    assert tail is not None and "TOOLS]" in tail and tail.count("found") == 90


def test_what_an_answer_that_is_begun_answers_stays(speak: Callable[..., Speaker]) -> None:
    speaker = speak()
    said = [_message("user", "long " * 990), _message("assistant", "Yes.")]
    asked = [_message("user", "word " * 600), _message("assistant", "It is")]
    _, tail = _between(speaker, SYSTEM, *said, *asked, continue_final=True)
    assert tail is not None and tail.count("word") == 600 and "long" not in tail
