"""The loop of an engine that holds an encoder: hear, choose a batch, run it, tell what came of it.

A text that takes longer than a batch should is run in parts, and others are served in between. A fault
of a batch is found out by running its texts one by one: whose text it is fails, nobody else.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from millrace.engine.encoding.queue import Pick, Queue, QueuedText
from millrace.engine.transport import Transport
from millrace.flight import FlightRecorder, NullRecorder
from millrace.models.device import memory_now
from millrace.models.encoders.load import EncoderBatch, LoadedEncoder, finished
from millrace.protocol import (
    Abort,
    AbortChoice,
    Encode,
    Encoded,
    Failed,
    Shutdown,
    Step,
    Submit,
    ToEngine,
)
from millrace.protocol.prefixes import CacheQuery, CacheReport, TierReport

log = logging.getLogger("millrace.engine")

BATCH_SECONDS = 0.25
"""What a batch should take: whoever comes waits for no more than one."""
LEAST_PATIENCE = 10.0
FIRST_PATIENCE = 300.0
"""Seconds that a part of the first batch may take, of which nothing is known."""
_PATIENCE = 20.0
"""Times what it should take that a batch may."""
WEIGH_EVERY = 0.5
_EMA_WEIGHT = 0.3
_Numbers = NDArray[np.float32]
_Work = Generator[None, None, mx.array]


@dataclass
class Limits:
    """How many tokens a batch may have, filling included."""

    least: int
    most: int


@dataclass
class _Long:
    """A text that is being run in parts."""

    pick: Pick
    work: _Work
    seconds: float = 0.0


class EncoderEngine:
    def __init__(
        self,
        encoder: LoadedEncoder,
        transport: Transport,
        limits: Limits,
        recorder: FlightRecorder | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._encoder = encoder
        self._transport = transport
        self._limits = limits
        self._recorder = recorder or NullRecorder()
        self._clock = clock
        self._queue = Queue()
        self._requests: dict[int, Encode] = {}
        self._left: dict[int, int] = {}
        """Texts of each request that have not been answered."""
        self._long: _Long | None = None
        self._rate: float | None = None
        """Tokens a second, lately."""
        self._weighed = 0.0
        self._stopping = False

    def run(self) -> None:
        while not self._stopping:
            self.turn()

    @property
    def busy(self) -> bool:
        return bool(self._queue or self._long)

    @property
    def tokens(self) -> int:
        """What a batch may have, as far as is known how long it takes."""
        if self._rate is None:
            return self._limits.least
        wanted = int(self._rate * BATCH_SECONDS)
        return max(self._limits.least, min(self._limits.most, wanted))

    def turn(self) -> None:
        if not self.busy:
            self._recorder.idle()
        for message in self._transport.receive(0.0 if self.busy else None):
            self._hear(message)
        if self._stopping or not self.busy:
            return
        if self._long is None:
            batch = self._queue.next(self.tokens)
        else:
            others = self._long.pick.request
            batch = self._queue.next(self.tokens, within=self.tokens, without=[others])
        if batch and self._long is None and batch[0].length > self.tokens:
            self._long = _Long(batch[0], self._work(batch))
            batch = []
        if batch:
            self._run(batch)
        if self._long is not None:
            self._go_on(self._long)

    def _hear(self, message: ToEngine) -> None:
        match message:
            case Encode():
                self._admit(message)
            case Abort(id=id):
                self._drop(id)
            case Shutdown():
                self._stopping = True
            case Submit(id=id):
                text = "This model makes no text."
                self._transport.send(Failed("invalid_request", text, id))
            case CacheQuery(id=query):
                self._transport.send(CacheReport(query, False, TierReport(0), None, {}))
            case AbortChoice():
                pass

    def _admit(self, request: Encode) -> None:
        lengths = [len(data) // 4 for data in request.inputs]
        if not lengths or min(lengths) < 1:
            text = "There is nothing to encode."
            self._transport.send(Failed("invalid_request", text, request.id))
            return
        if any(
            np.frombuffer(data, "<i4").max() >= self._encoder.vocabulary for data in request.inputs
        ):
            # A tokenizer may know more tokens than its model.
            text = f"A token is beyond the {self._encoder.vocabulary} that the model has."
            self._transport.send(Failed("invalid_request", text, request.id))
            return
        self._requests[request.id] = request
        self._left[request.id] = len(lengths)
        texts = (QueuedText(length, number) for number, length in enumerate(lengths))
        self._queue.add(request.id, texts, request.priority, request.caller)

    def _drop(self, id: int) -> None:
        self._queue.drop(id)
        self._requests.pop(id, None)
        self._left.pop(id, None)
        if self._long is not None and self._long.pick.request == id:
            self._long.work.close()
            self._long = None

    def _work(self, batch: Sequence[Pick]) -> _Work:
        """The pass of a batch, of requests that all want the same kind of numbers."""
        requests = [self._requests[p.request] for p in batch]
        first = requests[0]
        texts = EncoderBatch(
            tokens=[
                np.frombuffer(r.inputs[p.place], "<i4").tolist()
                for r, p in zip(requests, batch, strict=True)
            ],
            segments=[_at(r.segments, p.place) for r, p in zip(requests, batch, strict=True)],
            skips=[_at(r.skips, p.place) for r, p in zip(requests, batch, strict=True)],
        )
        if first.kind == "logits":
            return self._encoder.logits(texts, first.wanted)
        return self._encoder.vectors(texts) if first.kind == "vectors" else self._states(texts)

    def _states(self, texts: EncoderBatch) -> _Work:
        return (yield from self._encoder.states(texts))

    def _run(self, batch: list[Pick]) -> None:
        for alike in self._alike(batch):
            named = list(dict.fromkeys(p.request for p in alike))
            tokens = len(alike) * max(p.length for p in alike)
            self._recorder.working(named, self._patience(tokens))
            start = self._clock()
            try:
                numbers = _read(finished(self._work(alike), self._recorder.progress))
            except Exception as error:
                self._one_by_one(alike, error)
                continue
            seconds = self._clock() - start
            self._learn(tokens, seconds)
            self._tell(alike, numbers, seconds)

    def _alike(self, batch: list[Pick]) -> list[list[Pick]]:
        """The batch by what is asked of the model."""
        groups: dict[tuple[str, tuple[int, ...]], list[Pick]] = {}
        for pick in batch:
            request = self._requests[pick.request]
            groups.setdefault((request.kind, tuple(request.wanted)), []).append(pick)
        return list(groups.values())

    def _one_by_one(self, batch: list[Pick], error: Exception) -> None:
        if len(batch) == 1:
            self._fail(batch[0].request, error)
            return
        log.warning("a batch of %d texts failed (%r); they are run one by one", len(batch), error)
        for pick in batch:
            if pick.request not in self._requests:
                continue
            self._recorder.working([pick.request], self._patience(pick.length))
            start = self._clock()
            try:
                numbers = _read(finished(self._work([pick]), self._recorder.progress))
            except Exception as own:
                self._fail(pick.request, own)
            else:
                self._tell([pick], numbers, self._clock() - start)

    def _go_on(self, long: _Long) -> None:
        """One part of what is being run in parts."""
        self._recorder.working([long.pick.request], self._patience(long.pick.length))
        start = self._clock()
        try:
            next(long.work)
            mx.synchronize()
            long.seconds += self._clock() - start
        except StopIteration as end:
            self._long = None
            self._end_long(long, end.value, start)
        except Exception as error:
            self._long = None
            self._fail(long.pick.request, error)

    def _end_long(self, long: _Long, found: mx.array, start: float) -> None:
        try:
            numbers = _read(found)
        except Exception as error:
            self._fail(long.pick.request, error)
            return
        long.seconds += self._clock() - start
        self._learn(long.pick.length, long.seconds)
        self._tell([long.pick], numbers, long.seconds)

    def _fail(self, id: int, error: Exception) -> None:
        log.error("request %d failed", id, exc_info=error)
        self._drop(id)
        text = f"The model could not take this input: {error}"
        self._transport.send(Failed("request_failed", text, id))

    def _tell(self, batch: Sequence[Pick], numbers: _Numbers, seconds: float) -> None:
        step = Step(seconds=seconds)
        for pick, found in zip(batch, numbers, strict=True):
            request = self._requests.get(pick.request)
            if request is None:
                continue
            if request.kind == "states":
                found = found[: pick.length]
            if request.kind != "logits":
                found = _shaped(found, request)
            if not np.isfinite(found).all():
                self._fail(pick.request, ValueError("what came of it is not a number."))
                continue
            rows = len(found) if found.ndim == 2 else 1
            place = request.places[pick.place]
            step.encoded.append(Encoded(pick.request, place, found.tobytes(), rows))
            self._left[pick.request] -= 1
            if not self._left[pick.request]:
                del self._left[pick.request], self._requests[pick.request]
        step.running = self._queue.texts + (self._long is not None)
        if not self.busy or self._clock() - self._weighed >= WEIGH_EVERY:
            self._weighed = self._clock()
            step.memory = memory_now()
        self._transport.send(step)

    def _learn(self, tokens: int, seconds: float) -> None:
        if seconds <= 0:
            return
        rate = tokens / seconds
        self._rate = rate if self._rate is None else self._rate + _EMA_WEIGHT * (rate - self._rate)

    def _patience(self, tokens: int) -> float:
        """Seconds within which some part of the work must be done."""
        if self._rate is None:
            return FIRST_PATIENCE
        return max(LEAST_PATIENCE, _PATIENCE * tokens / self._rate)


def _at(values: list[int], place: int) -> int:
    return values[place] if values else 0


def _read(found: mx.array) -> _Numbers:
    numbers: _Numbers = np.array(found.astype(mx.float32))
    return numbers


def _shaped(found: _Numbers, request: Encode) -> _Numbers:
    """Cut, and of length 1, as the request wants it."""
    found = found[..., : request.dimensions]
    if not request.normalize:
        return np.ascontiguousarray(found)
    length = np.sqrt((found.astype(np.float64) ** 2).sum(axis=-1, keepdims=True))
    return np.ascontiguousarray(found / np.maximum(length, 1e-12), dtype=np.float32)
