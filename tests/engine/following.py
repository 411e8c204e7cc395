"""An engine that writes down the orders for its ranks, and a rank that follows them in this process."""

from __future__ import annotations

import copy
from typing import Any

from engine.harness import Bench

from millrace.cache.store import SegmentStore
from millrace.engine.adapters import Adapters
from millrace.engine.ranks.executors import FollowingExecutor
from millrace.engine.ranks.follower import Follower
from millrace.engine.ranks.order import Order, checksum, encoder
from millrace.engine.runner import Runner
from millrace.engine.sampler import Sampler
from millrace.engine.sampling import HostSampling
from millrace.engine.turn import Seen, Turn
from millrace.engine.vision_inputs import VisionInputs
from millrace.models.splitting import behead
from millrace.protocol import Picture


class Leading(Bench):
    """An engine whose orders are written down."""

    orders: list[bytes]

    def _note(self, seen: Seen, turn: Turn, pictures: list[Picture]) -> None:
        self.orders = getattr(self, "orders", [])
        state = checksum(self.engine.state())
        self.orders.append(encoder.encode(Order(turn, seen.outcome.rows, check=state)))


def follower_of(model: Any, vocabulary: int | None = None) -> Follower:
    """A rank with a copy of the model that draws no tokens itself."""
    model = copy.deepcopy(model)
    behead(model)
    runner = Runner(model)
    store = SegmentStore(runner.make_caches, runner.layout, None, runner.segments(pack=False))
    sampler = Sampler(HostSampling())
    adapters = Adapters(runner.adapters, 0)
    vision_inputs = VisionInputs(model)
    return Follower(
        FollowingExecutor(
            runner, sampler, adapters, vision_inputs, None, store, vocabulary=vocabulary
        )
    )
