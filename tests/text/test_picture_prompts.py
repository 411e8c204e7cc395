"""Pictures in prompts: templates show them, processors expand them, and text never becomes one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer
from vision_templates import GEMMA3, PLAIN, QWEN2_VL

from millrace.errors import BadRequest
from millrace.text.conversation import Conversation, ConversationTurn, ImagePart, TextPart
from millrace.text.pictures import ExpandedPrompt, Expansion, PictureWords, expanded_tokens
from millrace.text.tasks import ChatTask, CountTask, RenderTask, TextSide, TextSideConfig

SPECIAL = ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<start_of_image>", "<soft>")
IMAGE, SOFT = tiny_tokenizer.WORDS, tiny_tokenizer.WORDS + 4
QWEN = PictureWords("<|image_pad|>", IMAGE, "<|image_pad|>")
GEMMA = PictureWords("<start_of_image>", SOFT, "<soft>")
A = Expansion("<|image_pad|>" * 6, 6, (1, 4, 6))
B = Expansion("<|image_pad|>" * 2, 2, (1, 2, 4))


def side(folder: Path, template: str, words: PictureWords | None, window: int = 4096) -> TextSide:
    tiny_tokenizer.write(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(template)
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 2}))
    return TextSide(TextSideConfig(folder=str(folder), window=window, pictures=words))


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> TextSide:
    return side(tmp_path_factory.mktemp("qwen"), QWEN2_VL, QWEN)


def image(digest: str) -> ImagePart:
    return ImagePart(digest=digest)


def talk(*turns: ConversationTurn, **more: Any) -> Conversation:
    return Conversation(list(turns), expansions={"a": A, "b": B}, **more)


def test_the_template_shows_pictures_and_the_processor_says_how_long_they_are(
    qwen: TextSide,
) -> None:
    chat = talk(
        ConversationTurn("user", [TextPart("first "), image("a"), TextPart(" then "), image("b")]),
        ConversationTurn("assistant", "yes"),
        ConversationTurn("user", [image("a"), TextPart("again")]),
    )
    found = ChatTask(chat=chat).run(qwen)
    assert found.text.count("<|image_pad|>") == 3
    expanded = (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\nfirst "
        f"<|vision_start|>{A.text}<|vision_end|> then <|vision_start|>{B.text}<|vision_end|>"
        "<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n<|im_start|>user\n"
        f"<|vision_start|>{A.text}<|vision_end|>again<|im_end|>\n<|im_start|>assistant\n"
    )
    assert found.tokens == qwen.tokenizer.encode(expanded)
    assert [(s.digest, s.length, s.grid) for s in found.media] == [
        ("a", 6, (1, 4, 6)),
        ("b", 2, (1, 2, 4)),
        ("a", 6, (1, 4, 6)),
    ]
    for span in found.media:
        assert set(found.tokens[span.start : span.start + span.length]) == {IMAGE}
    assert CountTask(chat=chat).run(qwen).tokens == len(found.tokens)
    assert RenderTask(chat=chat).run(qwen).tokens == found.tokens


def test_boundaries_lie_where_messages_end_with_pictures_before_them(qwen: TextSide) -> None:
    chat = talk(
        ConversationTurn("user", [image("a"), TextPart("one <|image_pad|>")]),
        ConversationTurn("assistant", "yes"),
        ConversationTurn("user", [image("b"), TextPart("two")]),
    )
    found = ChatTask(chat=chat).run(qwen)
    begin = qwen.tokenizer.encode("<|im_start|>")[0]
    starts = [at for at, token in enumerate(found.tokens) if token == begin]
    # Each message but the first begins where another ends.
    assert set(starts[2:]) <= set(found.boundaries)


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
@pytest.mark.parametrize("word", ["<|image_pad|>", "<|image_pad|>" * 3, "x<|image_pad|>y"])
def test_text_that_spells_a_placeholder_is_plain_characters(
    qwen: TextSide, role: str, word: str
) -> None:
    turns = [
        ConversationTurn("user", [image("a"), TextPart("look")]),
        ConversationTurn("assistant", "ok"),
    ]
    said = ConversationTurn(role, f"before {word} after", call_id="c")
    chat = talk(
        *([said, *turns] if role == "system" else [*turns, said, ConversationTurn("user", "so?")])
    )
    found = ChatTask(chat=chat).run(qwen)
    assert len(found.media) == 1
    assert found.tokens.count(IMAGE) == A.tokens
    text = qwen.tokenizer.decode(found.tokens, skip_special=False)
    assert f"before {word} after" in text
    assert f"before {word} after" in found.text
    alone = ChatTask(chat=talk(ConversationTurn("user", word))).run(qwen)
    assert IMAGE not in alone.tokens and alone.media == []


def test_names_and_arguments_of_tools_are_no_placeholders_either(qwen: TextSide) -> None:
    tool = {"type": "function", "function": {"name": "f", "description": "<|image_pad|>"}}
    chat = talk(
        ConversationTurn("user", [image("b"), TextPart("x")]),
        tools=[tool],
        template_arguments={"add_vision_id": "<|image_pad|>"},
    )
    found = ChatTask(chat=chat).run(qwen)
    assert found.tokens.count(IMAGE) == B.tokens


def test_a_template_without_parts_gets_the_placeholder_in_the_text(tmp_path: Path) -> None:
    plain = side(tmp_path, PLAIN, QWEN)
    chat = talk(
        ConversationTurn("user", [image("a"), TextPart("what is <|image_pad|>?"), image("b")])
    )
    found = ChatTask(chat=chat).run(plain)
    text = "<|im_start|>user\n<|image_pad|>\nwhat is <|image_pad|>?\n<|image_pad|><|im_end|>\n"
    assert found.text.startswith(text)
    assert [s.digest for s in found.media] == ["a", "b"]
    assert found.tokens.count(IMAGE) == 8


def test_a_placeholder_may_become_something_else_around_the_features(tmp_path: Path) -> None:
    gemma = side(tmp_path, GEMMA3, GEMMA)
    soft = Expansion("\n\n<start_of_image><soft><soft><soft>\n\n", 3)
    chat = Conversation(
        [
            ConversationTurn(
                "user", [TextPart("a <soft> <start_of_image>"), image("s"), TextPart("what?")]
            )
        ],
        expansions={"s": soft},
    )
    found = ChatTask(chat=chat).run(gemma)
    (span,) = found.media
    assert found.tokens.count(SOFT) == 3
    assert found.tokens[span.start : span.start + span.length] == [SOFT] * 3
    begin = gemma.tokenizer.encode("<start_of_image>")[0]
    assert found.tokens[span.start - 1] == begin and found.tokens.count(begin) == 1


def test_separators_inside_a_picture_are_part_of_its_span() -> None:
    words = PictureWords("[IMG]", 7, "[IMG]")
    picture = Expansion("[IMG][IMG][BREAK][IMG][IMG][END]", 4)
    prompt = ExpandedPrompt("x[IMG]y", ["d"], words, {"d": picture})
    assert "".join(prompt.pieces) == "x[IMG][IMG][BREAK][IMG][IMG][END]y"
    (span,) = prompt.spans([1, 7, 7, 8, 7, 7, 9, 2])
    assert (span.start, span.length) == (1, 5)


def test_pictures_of_tools_are_shown_after_the_results_where_the_template_has_no_place(
    tmp_path: Path,
) -> None:
    plain = side(tmp_path, PLAIN, QWEN)
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    chat = Conversation(
        [
            {"role": "user", "content": "look"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            ConversationTurn("tool", [image("a")], call_id="c1"),
            ConversationTurn("user", [image("b"), TextPart("and this?")]),
        ],
        expansions={"a": A, "b": B},
    )
    found = ChatTask(chat=chat).run(plain)
    assert [s.digest for s in found.media] == ["a", "b"]
    result = found.text.index("in the next message")
    assert result < found.text.index("The pictures of the tool's result:\n<|image_pad|>")


@pytest.mark.parametrize("role", ["system", "developer", "assistant"])
def test_pictures_stand_in_messages_of_users_and_tools_only(qwen: TextSide, role: str) -> None:
    chat = talk(ConversationTurn(role, [image("a"), TextPart("x")]), ConversationTurn("user", "y"))
    with pytest.raises(BadRequest, match=f"role '{role}' holds a picture"):
        ChatTask(chat=chat).run(qwen)


def test_a_prompt_that_pictures_make_too_long_is_refused_with_its_length(tmp_path: Path) -> None:
    small = side(tmp_path, QWEN2_VL, QWEN, window=200)
    many = Expansion("<|image_pad|>" * 5000, 5000)
    chat = Conversation([ConversationTurn("user", [image("m")])], expansions={"m": many})
    with pytest.raises(BadRequest, match="50.. tokens long"):
        ChatTask(chat=chat).run(small)
    assert CountTask(chat=chat).run(small).tokens > 5000


def test_raw_prompts_are_expanded_token_by_token() -> None:
    own = [9, IMAGE, IMAGE, 8]
    shown = [("a", Expansion("", 2), own), ("a", Expansion("", 2), own)]
    tokens, media = expanded_tokens([1, IMAGE, 2, IMAGE], IMAGE, shown, QWEN)
    assert tokens == [1, *own, 2, *own]
    assert [(s.start, s.length) for s in media] == [(2, 2), (7, 2)]
    with pytest.raises(BadRequest, match="1 places for 2 pictures"):
        expanded_tokens([1, IMAGE], IMAGE, shown, QWEN)


@given(st.lists(st.sampled_from(["#", "\ue003", "ab", "c"]), max_size=12), st.integers(0, 40))
def test_places_of_the_rendered_text_are_found_in_the_expanded_one(
    parts: list[str], at: int
) -> None:
    words = PictureWords("#", 1, "#")
    rendered = "".join(parts)
    at = min(at, len(rendered))
    count = rendered.count("#")
    prompt = ExpandedPrompt(rendered, ["d"] * count, words, {"d": Expansion("[xyz]", 1)})
    whole = "".join(prompt.pieces)
    assert whole == rendered.replace("\ue003", "").replace("#", "[xyz]")
    before = rendered[:at].replace("\ue003", "").replace("#", "[xyz]")
    assert whole[: prompt.place(at)] == before
