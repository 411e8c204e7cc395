"""Rate limits: how many requests and tokens a caller may use per minute.

Pure, with the clock handed in. A bucket holds a minute's worth and fills evenly. Each prompt of a request
counts as a request, before any work is done for it. Tokens are charged when an answer has ended, so that
bucket may be overdrawn, and its owner waits until it is not.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from millrace.config import LimitSettings
from millrace.errors import BadRequest, RateLimited

Kind = Literal["requests", "tokens"]
_MINUTE = 60.0
_BLINK = 1e-6
"""Seconds that rounding may leave of a wait that is over."""
_MANY = 1024


class Bucket:
    def __init__(self, per_minute: int, now: float) -> None:
        self.limit = per_minute
        self._level = float(per_minute)
        self._seen = now

    def level(self, now: float) -> float:
        """What is left; below zero after an answer that cost more than there was."""
        self._level = min(self.limit, self._level + self._filled(now))
        self._seen = max(now, self._seen)
        return self._level

    def take(self, amount: float, now: float) -> None:
        self._level = self.level(now) - amount

    def wait(self, wanted: float, now: float) -> float:
        """Seconds until the level is `wanted`."""
        return max(0.0, wanted - self.level(now)) * _MINUTE / self.limit

    def _filled(self, now: float) -> float:
        return max(0.0, now - self._seen) * self.limit / _MINUTE


@dataclass(frozen=True)
class LimitStanding:
    """What a caller is told of one limit."""

    kind: Kind
    limit: int
    remaining: int
    reset: float
    """Seconds until the limit is whole again."""


@dataclass(frozen=True)
class OwnLimits:
    """The limits that the configuration file sets for one key or model."""

    settings: LimitSettings
    table: str
    """Where they stand, like [keys.NAME]."""


class RateLimits:
    """The buckets of every caller; one who has not been seen for a minute needs none.

    `own` has the callers with rates of their own, which replace those of all.
    """

    def __init__(
        self,
        requests: int | None,
        tokens: int | None,
        clock: Callable[[], float] = time.monotonic,
        own: Mapping[str, OwnLimits] | None = None,
    ) -> None:
        self._limits = _rates(requests, tokens)
        self._own = dict(own or {})
        self._clock = clock
        self._callers: dict[str, dict[Kind, Bucket]] = {}
        self._crowd = _MANY

    def __bool__(self) -> bool:
        return bool(self._limits) or any(_own_rates(one) for one in self._own.values())

    def admit(self, caller: str, *, tokens: bool = True) -> None:
        """Count a request, or raise how long to wait for the next one; a refused one is free.

        `tokens` says whether the request may use any: one that does not is not held to that limit.
        """
        now = self._clock()
        buckets = self._of(caller, now)
        if not tokens:
            buckets = {kind: bucket for kind, bucket in buckets.items() if kind != "tokens"}
        if not buckets:
            return
        waits = {kind: bucket.wait(1.0, now) for kind, bucket in buckets.items()}
        kind = max(waits, key=waits.__getitem__)
        if waits[kind] > _BLINK:
            raise self._used_up(caller, kind, waits[kind])
        if "requests" in buckets:
            buckets["requests"].take(1.0, now)

    def give_back(self, caller: str, prompts: int) -> None:
        """Take back that prompts were counted, which were refused for another reason."""
        now = self._clock()
        if bucket := self._of(caller, now).get("requests"):
            bucket.take(-float(prompts), now)

    def admit_prompts(self, caller: str, prompts: int, param: str) -> None:
        """Count the further prompts of a request that was admitted as one; raises as `admit` does.

        More than the limit of a minute are never granted at once: that is an error, and no wait ends it.
        """
        now = self._clock()
        bucket = self._of(caller, now).get("requests")
        if bucket is None or prompts <= 1:
            return
        if prompts > bucket.limit:
            raise BadRequest(
                f"The request has {prompts} prompts, each of which counts as a request, and the limit "
                f"is {bucket.limit} requests per minute ({self._option(caller, 'requests')}). Send at most "
                f"{bucket.limit} prompts at a time.",
                param=param,
            )
        if (wait := bucket.wait(prompts - 1.0, now)) > _BLINK:
            bucket.take(-1.0, now)
            raise self._used_up(caller, "requests", wait, prompts)
        bucket.take(prompts - 1.0, now)

    def _used_up(self, caller: str, kind: Kind, wait: float, prompts: int = 1) -> RateLimited:
        wanted = f", and this request has {prompts} prompts" if prompts > 1 else ""
        return RateLimited(
            f"The limit of {self._rates(caller)[kind]} {kind} per minute is used up "
            f"({self._option(caller, kind)}){wanted}. Try again in {math.ceil(wait)} s.",
            retry_after=wait,
        )

    def _rates(self, caller: str) -> dict[Kind, int]:
        return self._limits | _own_rates(self._own.get(caller))

    def _option(self, caller: str, kind: Kind) -> str:
        """Where the limit is set."""
        own = self._own.get(caller)
        if own is not None and kind in _own_rates(own):
            return f"rate_{kind} in {own.table}"
        return f"--rate-{kind}"

    def charge(self, caller: str, tokens: int) -> None:
        now = self._clock()
        if bucket := self._of(caller, now).get("tokens"):
            bucket.take(tokens, now)

    def standings(self, caller: str) -> list[LimitStanding]:
        now = self._clock()
        return [
            LimitStanding(k, b.limit, max(0, math.floor(b.level(now))), b.wait(b.limit, now))
            for k, b in self._of(caller, now).items()
        ]

    def _of(self, caller: str, now: float) -> dict[Kind, Bucket]:
        if caller not in self._callers:
            if len(self._callers) >= self._crowd:
                self._forget(now)
            self._callers[caller] = {k: Bucket(v, now) for k, v in self._rates(caller).items()}
        return self._callers[caller]

    def _forget(self, now: float) -> None:
        """A full bucket is as good as none."""
        self._callers = {
            caller: buckets
            for caller, buckets in self._callers.items()
            if any(b.level(now) < b.limit for b in buckets.values())
        }
        self._crowd = max(_MANY, 2 * len(self._callers))


def _rates(requests: int | None, tokens: int | None) -> dict[Kind, int]:
    asked: dict[Kind, int | None] = {"requests": requests, "tokens": tokens}
    return {kind: limit for kind, limit in asked.items() if limit is not None}


def _own_rates(own: OwnLimits | None) -> dict[Kind, int]:
    return {} if own is None else _rates(own.settings.rate_requests, own.settings.rate_tokens)
