"""A request for numbers on its way: which texts are done, and what came of them.

Texts are independent, so that a resume is the texts that are not done yet.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import msgspec

from millrace.errors import MillraceError
from millrace.protocol import Encode, Encoded
from millrace.serving.engine_request import EngineRequest


class EncodingInFlight(EngineRequest):
    def __init__(
        self,
        id: str,
        request: Encode,
        abandon: Callable[[EncodingInFlight], None],
        endpoint: str = "",
        caller: str = "",
    ) -> None:
        super().__init__(id, request.id, set(request.places), abandon, endpoint, caller)
        self._request = request
        self._lengths = {
            place: len(data) // 4
            for place, data in zip(request.places, request.inputs, strict=True)
        }
        self._total = sum(self._lengths.values())
        self._found: dict[int, Encoded] = {}
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def prompt_tokens(self) -> int:
        return self._total

    @property
    def tokens_generated(self) -> int:
        return len(self._found)

    @property
    def max_tokens(self) -> int:
        return len(self._lengths)

    @property
    def priority(self) -> int:
        return self._request.priority

    def begin(self, behind: float = 0.0, *, apart: bool = False) -> Encode:
        self.running = True
        request = self._request
        if not self._found:
            return request
        left = [n for n, place in enumerate(request.places) if place in self.open]
        return msgspec.structs.replace(
            request,
            inputs=[request.inputs[n] for n in left],
            places=[request.places[n] for n in left],
            segments=[request.segments[n] for n in left] if request.segments else [],
            skips=[request.skips[n] for n in left] if request.skips else [],
        )

    def take(self, encoded: Encoded) -> int:
        """Note what came of a text; returns the tokens that were run for it."""
        if encoded.place not in self.open:
            return 0
        self.last_token = time.monotonic()
        if self.first_token is None:
            self.first_token = self.last_token
        self._found[encoded.place] = encoded
        self.open.discard(encoded.place)
        self.prefilled += self._lengths[encoded.place]
        if not self.open and not self._ended.done():
            self._ended.set_result(None)
        return self._lengths[encoded.place]

    def fail(self, error: MillraceError) -> None:
        self.open.clear()
        if not self._ended.done():
            self._ended.set_exception(error)
            # Nobody may be waiting, and then nobody needs to hear of it.
            self._ended.exception()

    async def found(self) -> list[Encoded]:
        """All texts' numbers, in their order; raises what went wrong."""
        await self._ended
        return [self._found[place] for place in sorted(self._found)]
