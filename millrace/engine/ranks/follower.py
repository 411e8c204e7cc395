"""A follower's process: `python -m millrace.engine.ranks.follower CONFIG RECORDER`, started by a worker.

It loads its part of the model and carries out what the first rank sends, until that is gone. What it is
doing it says on its standard output, a line of JSON each; its standard input is a pipe from the worker,
whose end is its own.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, NoReturn

from millrace import gc_settings
from millrace.config import EngineConfig
from millrace.distributed import channel as channels
from millrace.distributed import environment
from millrace.distributed.channel import Channel
from millrace.distributed.handshake import Refused
from millrace.distributed.messages import CANNOT_START, DRIFTED, PEER_LOST
from millrace.engine.process import begin
from millrace.engine.ranks.leader import GATHER_SECONDS, TURNS
from millrace.engine.ranks.order import (
    Close,
    Closed,
    FromLeader,
    Go,
    Known,
    Observed,
    Order,
    Share,
    checksum,
    encoder,
    from_leader,
)
from millrace.errors import MillraceError
from millrace.flight import SharedRecorder

if TYPE_CHECKING:
    from millrace.cache.store import SegmentStore

log = logging.getLogger("millrace.engine")

_RETRY = 0.2
_DISK_LOOK = 0.02
"""Seconds between looks at the disk while there is nothing else to do."""
CLOSING_SECONDS = 10.0


class Drifted(Exception):
    """This rank's state is not the first one's."""


class Follower:
    """Carries out orders; `executor` is whose state they change."""

    def __init__(self, executor: Any, store: SegmentStore | None = None) -> None:
        self._executor = executor
        self._store = store
        self.checks = 0
        self.turns = 0

    def obey(self, order: FromLeader) -> bool:
        """Returns whether there may be more."""
        match order:
            case Order(turn=turn, taken=taken, shown=shown, check=check):
                self._executor.take(taken)
                self._executor.see(shown)
                self._compare(check)
                self._executor.execute(turn, lambda step: None)
                self.turns += 1
                return True
            case Close(taken=taken, shown=shown, check=check, writes=writes):
                self._executor.take(taken)
                self._executor.see(shown)
                self._compare(check)
                if self._store is not None:
                    self._store.close(writes, CLOSING_SECONDS)
                return False
            case Known(nodes=nodes):
                if self._store is not None:
                    self._store.forget_others(set(nodes))
                return True
            case Go():
                raise Drifted("the group was to be joined twice")

    def _compare(self, check: int | None) -> None:
        if check is None:
            return
        if checksum(self._executor.state()) != check:
            raise Drifted(f"its state after {self.turns} turns is not the first rank's")
        self.checks += 1


def main() -> None:
    raw, file = sys.argv[1:3]
    config, recorder = begin(raw, file)
    threading.Thread(target=_end_with_worker, daemon=True).start()
    assert config.seat is not None and config.group is not None
    environment.enter(config.group, config.seat.rank)
    try:
        _follow(config, recorder)
    except MillraceError as error:
        _say(error=error.message)
        log.error("%s", error.message)
        _end(CANNOT_START)
    except Drifted as error:
        _say(error=f"It has drifted: {error}.")
        log.error("this rank has drifted: %s", error)
        _end(DRIFTED)
    except Exception as error:  # of whatever a model raises, the group begins again
        _say(error=str(error) or repr(error))
        if isinstance(error, OSError) or "peer" in str(error):
            log.warning("this rank lost another: %s", error)
            _end(PEER_LOST)
        log.exception("this rank cannot go on")
        _end(1)
    _end(0)


def _follow(config: EngineConfig, recorder: SharedRecorder) -> None:
    from millrace.engine.ranks.build import build_follower

    channel: Channel | None = None

    def meet() -> None:
        nonlocal channel
        channel = _connected(config)
        _say(stage="waiting for the others")
        order = _heard(channel)
        if not isinstance(order, Go):
            raise ConnectionError("the first rank went away")
        _say(stage="joining the group of ranks")

    def share(mine: Share) -> None:
        assert channel is not None
        channel.send(encoder.encode(mine))

    loaded = build_follower(config, meet, lambda stage: _say(stage=stage), share)
    assert channel is not None
    environment.leave()
    _say(stage="ready", weight_bytes=loaded.weight_bytes, peak=loaded.peak())
    follower = Follower(loaded.executor, loaded.store)
    gc_settings.settle()
    recorder.idle()
    told = time.monotonic()
    while True:
        if loaded.on_disk:
            _watch_disk(loaded.store, channel)
        order = _heard(channel)
        if order is None:
            raise ConnectionError("the first rank is gone")
        more = follower.obey(order)
        if not more or time.monotonic() - told > 1.0:
            told = time.monotonic()
            _say(
                stage="ready",
                turns=follower.turns,
                checks=follower.checks,
                peak=loaded.peak(),
                weight_bytes=loaded.weight_bytes,
            )
        if not more:
            break
    channel.send(encoder.encode(Closed(follower.checks)))
    channel.close()


def _watch_disk(store: SegmentStore | None, channel: Channel) -> None:
    """Until there is an order, tell what happens on the disk."""
    assert store is not None
    while True:
        if seen := store.poll():
            channel.send(encoder.encode(Observed(seen)))
        if channel.wait(_DISK_LOOK):
            return


def _connected(config: EngineConfig) -> Channel:
    """To the first rank, which may be slower to start than this one."""
    assert config.seat is not None
    seat, secret = config.seat, environment.seat_secret(config.seat)
    deadline = time.monotonic() + GATHER_SECONDS
    while True:
        try:
            return channels.connect(seat.turns, secret, TURNS, seat.rank, 5.0)
        except (OSError, Refused) as error:
            if time.monotonic() > deadline:
                raise ConnectionError(f"the first rank does not answer: {error}") from error
            time.sleep(_RETRY)


def _heard(channel: Channel) -> FromLeader | None:
    data = channel.receive()
    if data is None:
        return None
    order: FromLeader = from_leader.decode(data)
    return order


def _say(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


def _end(status: int) -> NoReturn:
    environment.leave()
    logging.shutdown()
    sys.stdout.flush()
    os._exit(status)


def _end_with_worker() -> None:
    while os.read(0, 4096):
        pass
    environment.leave()
    os._exit(0)


if __name__ == "__main__":
    main()
