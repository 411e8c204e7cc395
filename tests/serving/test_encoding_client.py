"""A request for numbers on its way: what is left after an engine's death, and what is told."""

from __future__ import annotations

import asyncio

import pytest

from millrace.errors import RequestFailed
from millrace.protocol import Encode, Encoded
from millrace.serving.encoding import EncodingInFlight


def made() -> EncodingInFlight:
    inputs = [bytes(4 * n) for n in (3, 5, 7)]
    request = Encode(9, inputs, [0, 1, 2], segments=[1, 2, 3], skips=[0, 1, 2])
    return EncodingInFlight("x", request, lambda _: None)


def test_a_resume_is_the_texts_that_are_not_done() -> None:
    async def check() -> None:
        active = made()
        assert active.begin().places == [0, 1, 2] and active.prompt_tokens == 15
        assert active.take(Encoded(9, 1, b"b")) == 5
        left = active.begin()
        assert (left.places, left.segments, left.skips) == ([0, 2], [1, 3], [0, 2])
        assert [len(i) for i in left.inputs] == [12, 28]
        assert active.milestone.tokens == 1 and active.open == {0, 2}
        assert active.take(Encoded(9, 1, b"again")) == 0
        active.take(Encoded(9, 2, b"c"))
        active.take(Encoded(9, 0, b"a"))
        assert [e.data for e in await active.found()] == [b"a", b"b", b"c"]

    asyncio.run(check())


def test_an_error_reaches_whoever_waits() -> None:
    async def check() -> None:
        active = made()
        active.fail(RequestFailed("no"))
        with pytest.raises(RequestFailed, match="no"):
            await active.found()

    asyncio.run(check())
