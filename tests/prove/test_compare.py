"""Two answers side by side: what is the same, what is a near-tie, and what is neither."""

from __future__ import annotations

import math

import numpy as np
import pytest

from millrace.engine.descent import drawn, numbers
from millrace.prove.compare import compared, could_draw, draw_margin, first_difference, tolerance
from millrace.prove.questions import TEMPERATURE, TOP_K, ProvedAnswer, Question

GREEDY, DRAWN = Question([1, 2], 3), Question([1, 2], 3, seed=5)
WIDTH = 49152
ALLOWED = tolerance("bfloat16", "metal")


def answer(*tokens: int, second: float = -9.0) -> ProvedAnswer:
    """Tokens of logprob -0.5, beside token 7 of the second logprob."""
    return ProvedAnswer(list(tokens), tops=[{7: second, t: -0.5} for t in tokens])


def verdict(one: ProvedAnswer, other: ProvedAnswer, question: Question = GREEDY) -> str:
    return compared([question], [one], [other], allowed=ALLOWED, width=WIDTH).verdict


def test_the_same_tokens_pass_and_their_logprobs_are_held_against_each_other() -> None:
    found = compared(
        [GREEDY], [answer(3, 4)], [answer(3, 4, second=-8.0)], allowed=ALLOWED, width=WIDTH
    )
    assert (found.verdict, found.tokens, found.noise) == ("pass", 2, 0.0)
    assert "1 of 1 answers the same, 2 tokens" in found.told()


def test_another_token_fails_and_is_told_with_both_logprobs() -> None:
    found = compared([GREEDY], [answer(3, 4)], [answer(3, 7)], allowed=ALLOWED, width=WIDTH)
    assert found.verdict == "fail" and found.tokens == 1
    assert "0 of 1 answers the same" in found.told()
    assert "not a near-tie at token 2: logprobs -0.5000 and -9.0000" in found.told()


def test_a_token_nearly_as_likely_is_a_near_tie() -> None:
    near = answer(3, 4, second=-0.5 - ALLOWED / 2)
    assert verdict(near, answer(3, 7)) == "near-tie"
    assert verdict(answer(3, 4, second=-0.5 - ALLOWED * 1.1), answer(3, 7)) == "fail"


def test_one_that_nobody_told_of_one_that_ends_and_one_without_logprobs_are_no_near_ties() -> None:
    assert verdict(answer(3, 4, second=-0.5), answer(3, 8)) == "fail"
    assert verdict(answer(3, 4), answer(3)) == "fail"
    assert verdict(answer(3), answer(3, 4)) == "fail"
    assert verdict(answer(3), answer()) == "fail"
    assert verdict(ProvedAnswer([3]), ProvedAnswer([7])) == "fail"


def test_one_far_difference_among_near_ones_fails() -> None:
    near, far = answer(4, second=-0.5), answer(4)
    found = compared([GREEDY] * 3, [near, far, near], [answer(7)] * 3, allowed=ALLOWED, width=WIDTH)
    assert found.verdict == "fail" and found.told().count("token 1") == 1
    assert compared([], [], [], allowed=ALLOWED, width=WIDTH).verdict == "not run"


@pytest.mark.parametrize("place", range(40))
def test_a_draw_is_retraced_and_its_border_found(place: int) -> None:
    dice = np.random.default_rng(place)
    ids = np.sort(dice.choice(WIDTH, 20, replace=False))
    weights = dice.random(20).astype(np.float32) + np.float32(0.01)
    tops = {int(i): TEMPERATURE * math.log(float(w)) for i, w in zip(ids, weights, strict=True)}
    levels = numbers(5, place, WIDTH)
    mine = int(ids[drawn(weights, ids, levels)])
    margins = {t: draw_margin(tops, (5, place), mine, t, width=WIDTH) for t in tops if t != mine}
    assert all(m is not None and 0 <= m <= 1 for m in margins.values())
    # What the seed did not draw is not explained by any rounding.
    for other in margins:
        assert draw_margin(tops, (5, place), other, mine, width=WIDTH) is None


def test_a_draw_from_many_that_are_as_likely_as_the_last_is_retraced() -> None:
    tops = {t: -1.0 - 0.125 * min(t, 10) for t in range(60)}
    ids = np.arange(60)
    weights = np.exp(np.array([tops[t] for t in range(60)]) / TEMPERATURE).astype(np.float32)
    drawn_at = [int(ids[drawn(weights, ids, numbers(5, place, WIDTH))]) for place in range(30)]
    assert max(drawn_at) > TOP_K
    for place, mine in enumerate(drawn_at):
        theirs = mine + 1 if mine < 59 else mine - 1
        assert draw_margin(tops, (5, place), mine, theirs, width=WIDTH) is not None


def test_a_drawn_token_is_a_near_tie_at_the_border_alone() -> None:
    number = numbers(5, 0, 16)[0]
    # Two tokens, and the number that draws lies just below what the first one has.
    share = number + 0.002
    tops = {0: TEMPERATURE * math.log(share), 1: TEMPERATURE * math.log(1 - share)}
    one, other = ProvedAnswer([0], tops=[tops]), ProvedAnswer([1])
    found = first_difference(DRAWN, one, other, allowed=0.2, width=16)
    assert found is not None and found.near and found.margin == pytest.approx(0.002)
    assert "from the border" in found.told()
    found = first_difference(DRAWN, one, other, allowed=0.02, width=16)
    assert found is not None and not found.near


def test_a_token_that_rounding_brings_among_the_likeliest_moves_the_borders() -> None:
    # Forty are as likely as the last that may be drawn from: half of them may fall out.
    tops = dict.fromkeys(range(10), -1.0) | {100 + t: -1.5 for t in range(40)}
    width = 4096
    weights = np.exp(np.array(list(tops.values())) / TEMPERATURE).astype(np.float32)
    ids = np.array(list(tops))
    for place in range(20):
        draw = (5, place)
        mine = int(ids[drawn(weights, ids, numbers(*draw, width))])
        assert could_draw(tops, draw, mine, 0.0, width=width)
        assert not any(could_draw(tops, draw, t, 0.0, width=width) for t in tops if t != mine)
        near = {t for t in tops if could_draw(tops, draw, t, 0.15, width=width)}
        assert mine in near and len(near) < len(tops)
        assert not could_draw(tops, draw, 2000, 0.15, width=width)


def test_low_precision_is_allowed_more() -> None:
    assert tolerance("float32", "cpu") < tolerance("float32", "cuda")
    assert tolerance("float16", "metal") < tolerance("bfloat16", "metal")
