"""The last look at a request: what comes out of it fits the engine's messages and its memory."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.errors import BadRequest
from millrace.protocol import Sampling, Thinking, encoder
from millrace.serving.request import Request, check_tokens, fit, seed_of

WIDTH, ROOM = 1000, 50

numbers = st.one_of(
    st.integers(),
    st.integers(-3, 3),
    st.sampled_from([2**k + d for k in (31, 32, 63, 64, 70) for d in (-1, 0, 1)]),
    st.floats(),
    st.booleans(),
)
SAMPLING = [f for f in Sampling.__struct_fields__ if f not in ("logit_bias", "bad_words")]
PLAIN = ["n", "max_tokens", "priority", "logprobs", "prompt_logprobs", "timeout", "seed"]


@given(
    sampling=st.dictionaries(st.sampled_from(SAMPLING), numbers, max_size=3),
    plain=st.dictionaries(st.sampled_from(PLAIN), numbers, max_size=2),
    ids=st.lists(st.one_of(st.integers(-2, WIDTH + 2), numbers), max_size=3),
    bias=st.dictionaries(st.integers(-2, WIDTH + 2), st.floats(), max_size=2),
)
def test_what_gets_through_can_be_sent_and_indexes_nothing_that_is_not_there(
    sampling: dict[str, Any], plain: dict[str, Any], ids: list[Any], bias: dict[int, float]
) -> None:
    wanted = Sampling(**sampling, logit_bias=bias)
    request = Request(id="a", prompt=[1], sampling=wanted, stop_token_ids=ids, **plain)
    try:
        fit(request, WIDTH, ROOM)
    except BadRequest as error:
        assert error.param is not None
        return
    made = request.sampling
    sent = [made, request.seed, request.priority, request.logprobs, request.prompt_logprobs]
    assert encoder.encode([*sent, request.stop_token_ids])
    assert all(type(t) is int and 0 <= t < WIDTH for t in [*ids, *bias])
    assert 0 <= made.top_k < WIDTH
    assert 0 <= made.min_tokens <= ROOM
    assert 1 <= request.n <= 128
    assert made.temperature >= 0 and 0 < made.top_p <= 1 and made.repetition_penalty >= 0.01


def test_a_thinking_budget_beyond_the_room_is_the_room() -> None:
    thinking = Thinking(budget=2**80, inside=True, opens=[1], closes=[2], ending=[2])
    request = Request(id="a", prompt=[1], thinking=thinking)
    fit(request, WIDTH, ROOM)
    assert request.thinking is not None and request.thinking.budget == ROOM
    request.thinking = msgspec.structs.replace(thinking, ending=[WIDTH])
    with pytest.raises(BadRequest, match="thinking"):
        fit(request, WIDTH, ROOM)


@pytest.mark.parametrize("ids", [[WIDTH], [-1], [True], ["1"], [None], [1.0], [2**70], [[1]]])
def test_what_is_no_token_is_refused_by_the_fields_name(ids: list[Any]) -> None:
    with pytest.raises(BadRequest, match="input_ids") as caught:
        check_tokens("input_ids", ids, WIDTH)
    assert caught.value.param == "input_ids"


def test_seeds_are_64_bits_with_or_without_a_sign() -> None:
    assert seed_of(None) is None
    assert seed_of(7) == 7
    assert len({seed_of(s) for s in (-1, -(2**63), 2**62, 5)}) == 4
    for seed in (2**64, -(2**63) - 1):
        with pytest.raises(BadRequest, match="seed"):
            seed_of(seed)
