"""The encoder's engine: batches bounded and fair, faults alone, long texts in parts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from millrace.models import device

mx = device.core()

from millrace.engine.encoding.loop import EncoderEngine, Limits  # noqa: E402
from millrace.engine.encoding.queue import Queue, QueuedText  # noqa: E402
from millrace.models.encoders.load import EncoderBatch  # noqa: E402
from millrace.protocol import Abort, Encode, Encoded, Failed, Shutdown, Step  # noqa: E402

LENGTHS = st.lists(st.integers(1, 300), min_size=1, max_size=40)


@given(st.lists(LENGTHS, min_size=1, max_size=6), st.integers(1, 600))
def test_every_text_runs_once_in_batches_within_the_bound(
    requests: list[list[int]], tokens: int
) -> None:
    queue = Queue()
    for number, lengths in enumerate(requests):
        queue.add(number, (QueuedText(n, place) for place, n in enumerate(lengths)))
    seen = Counter[tuple[int, int]]()
    while queue:
        batch = queue.next(tokens)
        longest = max(p.length for p in batch)
        assert len(batch) == 1 or len(batch) * longest <= tokens
        assert all(p.length >= min(0.75 * longest, longest - 16) for p in batch)
        seen.update((p.request, p.place) for p in batch)
    assert seen == {(r, p): 1 for r, lengths in enumerate(requests) for p in range(len(lengths))}


@given(st.integers(1, 20), st.integers(1, 200), st.integers(1, 200))
def test_a_newcomer_is_in_the_next_batch_or_the_one_after_each_of_its_elders(
    elders: int, old: int, new: int
) -> None:
    queue = Queue()
    for number in range(elders):
        queue.add(number, (QueuedText(old, place) for place in range(500)))
    for _ in range(7):
        queue.next(400)
    queue.add(99, [QueuedText(new, 0)])
    batches = [queue.next(400) for _ in range(elders + 1)]
    assert any(p.request == 99 for batch in batches for p in batch)


def test_higher_priorities_go_first_and_dropped_requests_never_run() -> None:
    queue = Queue()
    queue.add(1, [QueuedText(10, 0)])
    queue.add(2, [QueuedText(50, 0)], priority=1)
    queue.add(3, [QueuedText(50, 0)])
    queue.drop(3)
    assert [[p.request for p in queue.next(50)] for _ in range(2)] == [[2], [1]]
    assert not queue and queue.next(50) == []


class Transport:
    def __init__(self, *messages: Any) -> None:
        self.inbox = [list(messages)]
        self.sent: list[Any] = []

    def receive(self, wait: float | None) -> list[Any]:
        return self.inbox.pop(0) if self.inbox else [] if wait == 0.0 else [Shutdown()]

    def send(self, message: Any) -> None:
        self.sent.append(message)

    @property
    def encoded(self) -> list[Encoded]:
        return [e for m in self.sent if isinstance(m, Step) for e in m.encoded]

    @property
    def failed(self) -> list[Failed]:
        return [m for m in self.sent if isinstance(m, Failed)]


class Sums:
    """An encoder whose vector is the sum of the tokens; 13 breaks it and 14 makes no number of it."""

    vocabulary = 100

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.parts: list[str] = []

    def vectors(self, batch: EncoderBatch) -> Generator[None, None, mx.array]:
        self.batches.append(batch.lengths)
        for part in range(3):
            self.parts.append(f"{max(batch.lengths)}.{part}")
            yield
        if any(13 in t for t in batch.tokens):
            raise RuntimeError("thirteen")
        sums = [[float(sum(t)), 1.0 if 14 not in t else float("nan")] for t in batch.tokens]
        return mx.array(sums)


def request(id: int, *texts: list[int], **more: Any) -> Encode:
    inputs = [np.array(t, "<i4").tobytes() for t in texts]
    return Encode(id, inputs, list(range(len(texts))), normalize=False, **more)


def run(*messages: Any, limit: int = 64, later: tuple[Any, ...] = ()) -> tuple[Transport, Sums]:
    """What comes of messages that are there at first, and of one more each turn."""
    transport, encoder = Transport(*messages), Sums()
    transport.inbox += [[message] for message in later]
    engine: Any = EncoderEngine(encoder, transport, Limits(limit, limit))  # type: ignore[arg-type]
    engine.run()
    return transport, encoder


def values(transport: Transport) -> dict[tuple[int, int], float]:
    return {(e.id, e.place): float(np.frombuffer(e.data, "<f4")[0]) for e in transport.encoded}


def test_requests_share_batches_and_get_their_own() -> None:
    transport, encoder = run(request(1, [1, 2], [3, 4]), request(2, [5, 6]))
    assert values(transport) == {(1, 0): 3, (1, 1): 7, (2, 0): 11}
    assert len(encoder.batches) == 1


def test_a_fault_is_its_requests_alone() -> None:
    transport, _ = run(request(1, [1, 2], [3, 4]), request(2, [13, 1]), request(3, [5, 5]))
    assert values(transport) == {(1, 0): 3, (1, 1): 7, (3, 0): 10}
    assert [(f.id, "thirteen" in f.message) for f in transport.failed] == [(2, True)]


def test_what_is_no_number_is_an_error_of_its_request() -> None:
    transport, _ = run(request(1, [1, 2]), request(2, [14, 1], [2, 2]), request(3, [5, 5]))
    found = values(transport)
    assert (found[1, 0], found[3, 0]) == (3, 10) and (2, 0) not in found
    assert [f.id for f in transport.failed] == [2]


def test_an_aborted_request_is_not_run() -> None:
    transport, encoder = run(request(1, [1, 2]), request(2, [5, 5]), Abort(1))
    assert values(transport) == {(2, 0): 10} and encoder.batches == [[2]]


def test_others_are_served_between_the_parts_of_a_long_text() -> None:
    short = tuple(request(n, [1] * 9) for n in range(2, 5))
    transport, encoder = run(request(1, [1] * 100), limit=10, later=short)
    assert set(values(transport)) == {(n, 0) for n in range(1, 5)}
    long = [i for i, part in enumerate(encoder.parts) if part.startswith("100")]
    between = encoder.parts[long[0] : long[-1]]
    assert any(part.startswith("9.") for part in between)


def test_dimensions_and_places_are_the_requests_own() -> None:
    asked = request(1, [1, 2], [3, 4], dimensions=1)
    asked.places = [7, 5]
    transport, _ = run(asked)
    assert values(transport) == {(1, 7): 3, (1, 5): 7}
    assert all(len(e.data) == 4 for e in transport.encoded)


def test_tokens_that_the_model_has_not_are_refused() -> None:
    transport, _ = run(request(1, [1, 2]), request(2, [5], [100]))
    assert values(transport) == {(1, 0): 3}
    assert [(f.id, f.code) for f in transport.failed] == [(2, "invalid_request")]
