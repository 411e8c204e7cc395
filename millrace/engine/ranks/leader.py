"""The first rank's side of its group: it waits for the others, learns what they have room for, and sends
them every turn. What a decision is, it does not know."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any, cast

from millrace.cache.observations import AnyObservation, FoundOnDisk
from millrace.cache.operations import AnyOperation
from millrace.cache.residency import Operations
from millrace.config import EngineConfig
from millrace.distributed.channel import Channel, Door, welcome
from millrace.distributed.environment import seat_secret
from millrace.distributed.handshake import Hello, Refused
from millrace.engine.memory import Budget
from millrace.engine.ranks.order import (
    Close,
    Closed,
    FromFollower,
    Go,
    Known,
    Observed,
    Order,
    PictureFeatures,
    Share,
    checksum,
    encoder,
    from_follower,
)
from millrace.engine.turn import Outcome, Seen, Turn
from millrace.errors import EngineUnavailable
from millrace.protocol import Picture

log = logging.getLogger("millrace.engine")

TURNS = "turns"
"""What a follower connects for."""
CHECK_EVERY = 50
"""Turns between two comparisons of states."""
GATHER_SECONDS = 300.0
LOAD_SECONDS = 600.0
CLOSE_SECONDS = 12.0
_ROW = 1024


class Leader:
    def __init__(self, config: EngineConfig, tell: Callable[[str], None]) -> None:
        """`tell` hears what is being waited for."""
        assert config.seat is not None and config.group is not None
        self._size = len(config.group.hosts)
        self._tell = tell
        self._door = Door(config.seat.turns, seat_secret(config.seat))
        self._channels: dict[int, Channel] = {}
        self._state: Callable[[], object] = tuple
        self._features: Callable[[str], Any] = lambda digest: None
        self._sent = 0
        self.found: dict[int, list[FoundOnDisk]] = {}
        """What the others' disks had at the start, by rank."""

    def meet(self) -> None:
        """Wait until all others are about to join the group, and have them join."""
        deadline = time.monotonic() + GATHER_SECONDS
        while len(self._channels) < self._size - 1:
            missing = sorted(set(range(1, self._size)) - set(self._channels))
            self._tell(f"waiting for rank {', '.join(map(str, missing))}")
            try:
                said, channel = self._door.next(max(0.01, deadline - time.monotonic()))
            except TimeoutError:
                raise EngineUnavailable(f"The ranks {missing} did not come.") from None
            try:
                welcome(channel, self._problem(said))
            except (OSError, Refused) as error:
                log.warning("rank %d is not let in: %s", said.rank, error)
                continue
            self._channels[said.rank] = channel
        self._door.close()
        self._send(encoder.encode(Go()))
        self._tell("joining the group of ranks")

    def _problem(self, said: Hello) -> str | None:
        if said.role != TURNS or not 0 < said.rank < self._size or said.rank in self._channels:
            return f"rank {said.rank} is not expected"
        return None

    def shares(self) -> list[Share]:
        """What each of the others has loaded; raises where one of them could not."""
        found: list[Share] = []
        for rank, channel in sorted(self._channels.items()):
            self._tell(f"waiting for rank {rank} to load its part")
            channel.within(LOAD_SECONDS)
            data = channel.receive()
            channel.within(None)
            share = from_follower.decode(data) if data is not None else None
            if not isinstance(share, Share):
                raise EngineUnavailable(f"Rank {rank} could not load its part.")
            found.append(share)
            self.found[rank] = share.found
        return found

    def lead(self, state: Callable[[], object], features: Callable[[str], Any]) -> None:
        """`state` is what the executor holds, to be compared; `features` what it has of a picture."""
        self._state, self._features = state, features

    def journal(self, seen: Seen, turn: Turn, pictures: list[Picture]) -> None:
        shown = self._shown(seen.outcome)
        if not turn.operations and not seen.outcome.rows and not shown:
            return
        self._sent += 1
        check = checksum(self._state()) if self._sent % CHECK_EVERY == 0 else None
        self._send(encoder.encode(Order(turn, seen.outcome.rows, shown, check)))

    def _shown(self, outcome: Outcome) -> list[PictureFeatures]:
        """What the pictures have become that are done."""
        from millrace.engine.ranks.picture_features import packed

        done = {p.digest: self._features(p.digest) for p in outcome.pictures if p.done}
        return [packed(digest, found) for digest, found in done.items() if found is not None]

    def _send(self, data: bytes) -> None:
        for rank, channel in self._channels.items():
            try:
                channel.send(data)
            except OSError as error:
                raise EngineUnavailable(f"Rank {rank} is gone: {error}.") from error

    def know(self, nodes: list[int]) -> None:
        """Of what is on disk, all have these."""
        self._send(encoder.encode(Known(nodes)))

    def observed(self) -> list[tuple[int, list[AnyObservation]]]:
        """What has happened on the others' disks since the last call, by rank."""
        found = []
        for rank, channel in self._channels.items():
            while channel.waits:
                said = self._heard(channel)
                if said is None:
                    raise EngineUnavailable(f"Rank {rank} is gone.")
                if isinstance(said, Observed):
                    found.append((rank, said.seen))
        return found

    def _heard(self, channel: Channel) -> FromFollower | None:
        data = channel.receive()
        said: FromFollower | None = from_follower.decode(data) if data is not None else None
        return said

    def close(self, outcome: Outcome, writes: Operations) -> None:
        """Let the others end, after a last comparison and their last writes; `end` waits for them."""
        with contextlib.suppress(EngineUnavailable):
            closing = cast("list[AnyOperation]", writes)
            last = Close(outcome.rows, self._shown(outcome), checksum(self._state()), closing)
            self._send(encoder.encode(last))

    def end(self) -> None:
        """Wait until the others have ended."""
        for rank, channel in self._channels.items():
            try:
                channel.within(CLOSE_SECONDS)
                said = self._heard(channel)
                while isinstance(said, Observed):
                    said = self._heard(channel)
                checks = said.checks if isinstance(said, Closed) else 0
                log.info("rank %d has ended; its state was found the same %d times", rank, checks)
            except (OSError, Refused):
                log.warning("rank %d did not say how it ended", rank)
            channel.close()


def smallest(budget: Budget, cached: int, shares: list[Share]) -> tuple[int, int]:
    """The bytes of the first rank's state and cache of which every rank's part fits where it is."""
    row = budget.cost.row(_ROW)
    kv = min([budget.limit, *(s.kv_bytes * row // max(1, s.row_bytes) for s in shares)])
    cache = min([cached, *(s.cache_bytes * row // max(1, s.row_bytes) for s in shares)])
    return kv, cache


def share_of(rank: int, weights: int, budget: Budget, cached: int, pictures: int) -> Share:
    return Share(rank, weights, budget.cost.row(_ROW), budget.limit, cached, pictures)
