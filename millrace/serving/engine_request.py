"""What every request has on its way, whatever it asks for: what the engine's client must know of it."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Literal

from millrace.caller import current_caller
from millrace.errors import MillraceError
from millrace.protocol import FinishReason, ToEngine
from millrace.protocol.prefixes import HitKind
from millrace.serving.suspicion import Milestone

Phase = Literal["queued", "scoring", "prefill", "decode"]
Outcome = Literal["running", "ok", "cancelled", "timeout", "error", "disconnected"]


class EngineRequest(ABC):
    def __init__(
        self,
        id: str,
        number: int,
        open: set[int],
        abandon: Callable[[Any], None],
        endpoint: str = "",
        caller: str = "",
    ) -> None:
        self.id = id
        """What the client calls it."""
        self.number = number
        """What the engine calls it."""
        self.open = open
        """The answers that have not finished."""
        self.endpoint = endpoint
        self.caller = caller
        """The id of the key that it came with; empty on a server without keys."""
        self.queue_caller = current_caller.get()
        """Whose share of queues it uses: the key, or the client's address on a server without keys."""
        self.prefilled = 0
        self.scored = 0
        """Prompt tokens that a draft has looked at."""
        self.cached = 0
        self.written = 0
        self.hit: HitKind = "none"
        self.deaths = 0
        """Engines that ended while they ran this request."""
        self.running = False
        """Handed to the engine that is up now."""
        self.outcome: Outcome = "running"
        self.finish: FinishReason | None = None
        """Why the answer that finished last did, where the engine ended it."""
        self.arrived = time.monotonic()
        self.first_token: float | None = None
        self.last_token = 0.0
        self.timer: asyncio.TimerHandle | None = None
        self._abandon = abandon

    def visible_to(self, viewer: str | None) -> bool:
        """Whether a caller may see and cancel it; None is one who may with all."""
        return viewer is None or self.caller == viewer

    @property
    def adapter(self) -> int:
        """The slot of the adapter that it needs; 0 is none."""
        return 0

    @property
    def answers(self) -> int:
        """What it counts for where answers are counted."""
        return 1

    @property
    @abstractmethod
    def prompt_tokens(self) -> int: ...

    @property
    @abstractmethod
    def tokens_generated(self) -> int:
        """What has come of it so far; of texts that are encoded, how many are."""

    @property
    def max_tokens(self) -> int:
        return 0

    @property
    def priority(self) -> int:
        return 0

    @property
    def phase(self) -> Phase:
        if self.first_token is not None:
            return "decode"
        if self.prefilled:
            return "prefill"
        return "scoring" if self.scored else "queued"

    @property
    def milestone(self) -> Milestone:
        return Milestone(self.tokens_generated, self.scored + self.prefilled)

    @property
    def sparse(self) -> dict[str, Any] | None:
        """What a draft has chosen of its prompt, if one has."""
        return None

    @abstractmethod
    def begin(self, behind: float = 0.0, *, apart: bool = False) -> ToEngine:
        """What is left to do, as a request to an engine that knows nothing of it.

        It gives way by so many seconds to those that the engine is given with it, where an engine has
        another order than that in which they come. `apart` keeps its prompt out of passes with others."""

    @abstractmethod
    def fail(self, error: MillraceError) -> None:
        """It ends with this error."""

    def close(self) -> None:
        """Nobody listens any more."""
        self._abandon(self)

    def summary(self, seconds: float) -> dict[str, Any]:
        """What the log says of it when it has ended."""
        first = self.first_token
        return {
            "outcome": self.outcome,
            "endpoint": self.endpoint,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached,
            "cache_hit": self.hit,
            "generated_tokens": self.tokens_generated,
            "ttft": round(first - self.arrived, 3) if first else None,
            "seconds": round(seconds, 3),
            "deaths": self.deaths,
            "id": self.id,
        } | ({"specprefill": self.sparse} if self.sparse else {})
