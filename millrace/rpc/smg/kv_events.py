"""What becomes of the prefix cache, and how busy the engine is, as a stream for a gateway's router.

A gateway names blocks by their token ids, which are other callers' prompts: a subscriber who may not see
them gets blocks under hashes that only this process can compute, and no ids.

Batches have rising numbers, and a bounded history of them is kept. Whoever begins, or has been away for
too long, gets a snapshot of all blocks first; the number at which a server begins is its own, so that
nobody goes on from where another server was.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from smg_grpc_proto.generated import common_pb2

from millrace.protocol.prefixes import AllGone, CacheChange
from millrace.rpc.smg.blocks import SIZE, BlockEvent, Cleared, KvBlocks, Removed, StoredBlocks
from millrace.rpc.smg.loads import Load

log = logging.getLogger("millrace.rpc")
messages: Any = common_pb2

MOST_BLOCKS = 1000
"""Of one batch."""
_HISTORY = 4096
"""Batches that are kept for those who were away."""
_LOOK = 0.25
"""Seconds between two looks at the load."""
_HEARTBEAT = 1.0
"""Seconds after which the load is told, changed or not."""


@dataclass(frozen=True)
class _Batch:
    number: int
    moment: float
    events: list[Any]


class KvEvents:
    def __init__(self, load: Callable[[], Load]) -> None:
        self._load = load
        self._blocks = KvBlocks()
        self._lost = False
        """The copy of the tree cannot be trusted until the cache is empty again."""
        self._number = int(time.time() * 1000)
        self._history: deque[_Batch] = deque(maxlen=_HISTORY)
        self._ids = itertools.count(1)
        self._news = asyncio.Event()
        self._closed = False
        self._secret = secrets.token_bytes(16)

    def close(self) -> None:
        """End all streams."""
        self._closed = True
        self._tell()

    def take(self, changes: Sequence[CacheChange]) -> None:
        """Note what the engine told of its cache."""
        if self._lost:
            self._lost = not any(isinstance(c, AllGone) for c in changes)
        if self._lost:
            return
        try:
            events = self._blocks.take(changes)
        except KeyError:
            log.exception("what an engine told of its cache does not fit; gateways see none of it")
            self._lost = True
            events = self._blocks.take([AllGone()])
        for group in _groups(events):
            self._number += 1
            told = [self._event(event) for event in group]
            self._history.append(_Batch(self._number, time.time(), told))
        if events:
            self._tell()

    async def subscribe(self, start: int, *, shows_tokens: bool = True) -> AsyncIterator[Any]:
        """Batches from `start` on, as far as they are kept; else from a snapshot on."""
        async for batch in self._batches(start):
            yield batch if shows_tokens else self._hidden(batch)

    async def _batches(self, start: int) -> AsyncIterator[Any]:
        behind = start - 1 if start and self._reaches(start) else None
        told: Load | None = None
        heard, sample = 0.0, 0
        while not self._closed:
            news = self._news
            if behind is None or not self._reaches(behind + 1):
                behind, found = self._number, self._snapshot()
                for batch in found:
                    yield batch
            for kept in [b for b in self._history if b.number > behind]:
                behind = kept.number
                yield _wire(kept)
            load, now = self._load(), time.monotonic()
            if load.counts != told or now - heard >= _HEARTBEAT:
                told, heard = load.counts, now
                sample += 1
                yield _load_batch(behind, load, sample)
            try:
                async with asyncio.timeout(_LOOK):
                    await news.wait()
            except TimeoutError:
                pass

    def _reaches(self, number: int) -> bool:
        """Whether all batches from this one on are kept."""
        first = self._history[0].number if self._history else self._number + 1
        return first <= number <= self._number + 1

    def _snapshot(self) -> list[Any]:
        """All blocks, as batches whose numbers end at the last one that was given."""
        events: list[BlockEvent] = [Cleared(), *self._blocks.snapshot()]
        groups = list(_groups(events))
        first = self._number - len(groups) + 1
        return [
            messages.KvEventBatch(
                sequence_number=first + index,
                timestamp=time.time(),
                events=[_event(event, 0) for event in group],
                dp_rank=0,
                snapshot=messages.KvSnapshotChunk(
                    index=index, count=len(groups), blocks=self._blocks.count
                ),
            )
            for index, group in enumerate(groups)
        ]

    def _hidden(self, batch: Any) -> Any:
        """A copy without token ids, whose hashes do not let a reader test what the tokens may be."""
        hidden = messages.KvEventBatch()
        hidden.CopyFrom(batch)
        for event in hidden.events:
            for block in event.stored.blocks:
                del block.token_ids[:]
                block.block_hash = self._keyed(block.block_hash)
            if event.stored.HasField("parent_block_hash"):
                event.stored.parent_block_hash = self._keyed(event.stored.parent_block_hash)
            for at, hash_ in enumerate(event.removed.block_hashes):
                event.removed.block_hashes[at] = self._keyed(hash_)
        return hidden

    def _keyed(self, hash_: int) -> int:
        words = hash_.to_bytes(8, "little", signed=True)
        made = hashlib.blake2b(words, digest_size=8, key=self._secret).digest()
        return int.from_bytes(made, "little", signed=True)

    def _event(self, event: BlockEvent) -> Any:
        return _event(event, next(self._ids))

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


def _groups(events: Iterable[BlockEvent]) -> Iterator[list[BlockEvent]]:
    """The events in parts of a bounded number of blocks."""
    group: list[BlockEvent] = []
    count = 0
    for event in itertools.chain.from_iterable(map(_parts, events)):
        size = len(event.blocks) if isinstance(event, StoredBlocks) else 1
        if group and count + size > MOST_BLOCKS:
            yield group
            group, count = [], 0
        group.append(event)
        count += size
    if group:
        yield group


def _parts(event: BlockEvent) -> Iterator[BlockEvent]:
    """An event of many blocks as several, each of which follows the one before it."""
    if not isinstance(event, StoredBlocks) or len(event.blocks) <= MOST_BLOCKS:
        yield event
        return
    parent = event.parent
    for start in range(0, len(event.blocks), MOST_BLOCKS):
        blocks = event.blocks[start : start + MOST_BLOCKS]
        yield StoredBlocks(parent, blocks)
        parent = blocks[-1].hash


def _event(event: BlockEvent, id: int) -> Any:
    match event:
        case StoredBlocks(parent=parent, blocks=blocks):
            stored = messages.KvBlocksStored(
                blocks=[
                    messages.KvBlock(block_hash=b.hash, token_ids=b.tokens, block_size=SIZE)
                    for b in blocks
                ],
                parent_block_hash=parent,
            )
            return messages.KvCacheEvent(event_id=id, stored=stored)
        case Removed(hashes=hashes):
            removed = messages.KvBlocksRemoved(block_hashes=hashes)
            return messages.KvCacheEvent(event_id=id, removed=removed)
        case Cleared():
            return messages.KvCacheEvent(event_id=id, cleared=messages.KvCacheCleared())


def _wire(batch: _Batch) -> Any:
    return messages.KvEventBatch(
        sequence_number=batch.number, timestamp=batch.moment, events=batch.events, dp_rank=0
    )


def _load_batch(number: int, load: Load, sample: int) -> Any:
    record = messages.EngineLoad(
        running_requests=load.running,
        waiting_requests=load.waiting,
        waiting_uncached_tokens=load.waiting_tokens,
        token_usage=load.usage,
        active_token_usage=load.usage,
        gen_throughput=load.throughput,
        max_running_requests=load.most_running,
        sample=sample,
        load_only=True,
        cache_hit_rate=load.hit_rate,
        num_used_tokens=load.used_tokens,
        max_total_num_tokens=load.most_tokens,
        prefill_pending_tokens=load.pending_tokens,
        engine_silence_ms=None if load.silence is None else int(1000 * load.silence),
        engine_reports_steps=True,
    )
    return messages.KvEventBatch(
        sequence_number=number, timestamp=time.time(), dp_rank=0, load=record
    )
