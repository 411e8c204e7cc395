"""What is asked: prompts of the wanted lengths, from any tokenizer, within any window."""

from __future__ import annotations

import pytest

from millrace.errors import SetupError
from millrace.prove.questions import (
    QUICK,
    ProvedAnswer,
    QuestionSettings,
    Tokenize,
    lengths,
    make,
    next_turn,
    text_of,
)


def by_letter(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def by_line(text: str) -> list[int]:
    return list(range(text.count("\n")))


@pytest.mark.parametrize("tokenize", [by_letter, by_line])
@pytest.mark.parametrize("tokens", [1, 4, 33, 300])
def test_a_prompt_has_exactly_as_many_tokens_as_it_should(tokenize: Tokenize, tokens: int) -> None:
    assert len(text_of("a", tokens, tokenize)) == tokens


def test_a_tokenizer_that_makes_nothing_of_words_is_told() -> None:
    with pytest.raises(SetupError):
        text_of("a", 9, lambda text: [])


@pytest.mark.parametrize("count", range(1, 9))
def test_prompts_are_of_all_lengths_up_to_the_longest(count: int) -> None:
    found = lengths(count, 450)
    assert found == sorted(set(found)) and len(found) == count and found[-1] == 450


@pytest.mark.parametrize("settings", [QuestionSettings(), QUICK])
@pytest.mark.parametrize("window", [256, 8192])
def test_half_of_the_questions_are_drawn_and_all_fit_the_window(
    settings: QuestionSettings, window: int
) -> None:
    made = make(settings, by_letter, window)
    half = settings.prompts
    assert len(made) == 2 * half
    assert all(q.seed is None and q.sampling()["temperature"] == 0 for q in made[:half])
    assert len({q.seed for q in made[half:]}) == half
    assert [q.ids for q in made[:half]] == [q.ids for q in made[half:]]
    assert all(len(q.ids) + q.tokens <= window for q in made)
    more = next_turn(made[0], ProvedAnswer([1, 2]), [3])
    assert more.ids == [*made[0].ids, 1, 2, 3]
