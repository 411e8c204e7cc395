"""The loop detector, held to the definition of a loop, and the choice pipeline that uses it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from millrace.protocol import RowTokens
from millrace.text.deltas import Content, TextFinish
from millrace.text.loops import LONGEST_PERIOD, MOST_REPEATED, AnswerLoop, LoopDetector
from millrace.text.pipeline import ChoicePipeline
from millrace.text.tokenizer import Tokenizer


def _by_definition(tokens: Sequence[int]) -> tuple[int, AnswerLoop] | None:
    """The first prefix whose last 257 or more tokens have a period of at most 64."""
    for end in range(MOST_REPEATED + 1, len(tokens) + 1):
        for period in range(1, LONGEST_PERIOD + 1):
            size = period
            while size < end and tokens[end - 1 - (size - period)] == tokens[end - 1 - size]:
                size += 1
            if size > MOST_REPEATED:
                return end, AnswerLoop(period, size)
    return None


def _detected(tokens: Sequence[int]) -> tuple[int, AnswerLoop] | None:
    detector = LoopDetector()
    for count, token in enumerate(tokens, 1):
        if (loop := detector.accept(token)) is not None:
            return count, loop
    return None


small = st.lists(st.integers(0, 2), max_size=30)


@given(small, st.lists(st.integers(0, 3), min_size=1, max_size=70), st.integers(0, 300), small)
@example([], [7], 257, [])
@example([], [7], 256, [])
@example([1], list(range(64)), 257, [])
@example([1], list(range(65)), 290, [])
@example([], [1, 1, 2], 256, [2] * 300)
def test_it_finds_what_the_definition_says(
    before: list[int], unit: list[int], repeated: int, after: list[int]
) -> None:
    periodic = [unit[i % len(unit)] for i in range(repeated)]
    tokens = before + periodic + after
    assert _detected(tokens) == _by_definition(tokens)


@given(st.integers(1, LONGEST_PERIOD), st.integers(0, 20))
def test_the_answer_ends_with_the_257th_token_of_a_loop(period: int, before: int) -> None:
    unit = list(range(1000, 1000 + period))
    tokens = list(range(before)) + unit * 300
    assert _detected(tokens) == (before + MOST_REPEATED + 1, AnswerLoop(period, MOST_REPEATED + 1))


def test_a_longer_period_is_no_loop() -> None:
    assert _detected(list(range(LONGEST_PERIOD + 1)) * 20) is None


def test_a_unit_that_changes_by_one_token_is_no_loop() -> None:
    rows = [token for row in range(200) for token in (5, 6, 7, 100 + row, 8)]
    assert _detected(rows) is None


@given(st.lists(st.integers(1, 40), max_size=40))
def test_how_tokens_are_grouped_makes_no_difference(groups: list[int]) -> None:
    tokens = list(range(50)) + [1, 2, 3] * 100
    whole = _detected(tokens)
    detector, found, at = LoopDetector(), None, 0
    for size in [*groups, len(tokens)]:
        for token in tokens[at : at + size]:
            at += 1
            if found is None and (loop := detector.accept(token)) is not None:
                found = at, loop
    assert found == whole


@pytest.fixture(scope="module")
def tokenizer(default_model: Path) -> Tokenizer:
    return Tokenizer(default_model)


def _read(pipeline: ChoicePipeline, tokens: list[int], step: int) -> tuple[str, TextFinish | None]:
    text, finish = "", None
    for at in range(0, len(tokens), step):
        last = at + step >= len(tokens)
        row = RowTokens(1, 0, tokens[at : at + step], "length" if last else None)
        for piece, _scores, _tokens in pipeline.feed(row):
            if isinstance(piece, Content):
                text += piece.text
            elif isinstance(piece, TextFinish):
                finish = piece
        if pipeline.done:
            break
    return text, finish


@pytest.mark.parametrize("step", [1, 7, 1000])
def test_the_pipeline_cuts_at_the_token(tokenizer: Tokenizer, step: int) -> None:
    tokens = tokenizer.encode("So: ") + tokenizer.encode(" the cat and the dog,") * 100
    end, loop = _by_definition(tokens) or (0, None)
    pipeline = ChoicePipeline(tokenizer.vocabulary, loop_guard=True, stops=["never", "dog, and"])
    text, finish = _read(pipeline, tokens, step)
    assert finish is not None
    assert (finish.reason, finish.matched, finish.loop) == ("stop", None, loop)
    assert (text, pipeline.tokens) == (tokenizer.decode(tokens[:end]), end)


def test_without_the_guard_nothing_is_cut(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode(" the cat and the dog,") * 100
    pipeline = ChoicePipeline(tokenizer.vocabulary)
    text, finish = _read(pipeline, tokens, 50)
    assert finish is not None
    assert (finish.reason, finish.loop, text) == ("length", None, tokenizer.decode(tokens))


def test_the_guard_waits_for_min_tokens(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode(" la") * 500
    pipeline = ChoicePipeline(tokenizer.vocabulary, loop_guard=True, min_tokens=400)
    _, finish = _read(pipeline, tokens, 9)
    assert finish is not None and finish.loop == AnswerLoop(1, 400)
    assert pipeline.tokens == 400
