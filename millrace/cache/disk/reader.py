"""The thread that reads: checks every byte, and hands out the part that a node owns."""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass

from millrace.cache.disk import files
from millrace.cache.disk.events import PayloadsRead, Trouble
from millrace.cache.disk.folder import Folder
from millrace.cache.disk.records import Blob
from millrace.cache.disk.shared_state import SharedState
from millrace.cache.payload import Payload


@dataclass(frozen=True)
class PayloadSource:
    """Where a payload comes from: memory, while it waits to be written, or its file."""

    blob: Blob
    payload: Payload | None
    lo: int = 0
    hi: int = 0
    """The part that is wanted; all of it where hi is 0."""


@dataclass(frozen=True)
class Want:
    node: int
    segment: PayloadSource | None
    checkpoint: PayloadSource | None
    missing: bool = False
    """There is no such thing."""


class DiskReader:
    def __init__(self, shared: SharedState, folder: Folder) -> None:
        self._shared = shared
        self._folder = folder
        self._tickets: queue.SimpleQueue[tuple[int, list[Want]] | None] = queue.SimpleQueue()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="cache-reader", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def ask(self, ticket: int, wants: list[tuple[int, bool, bool]]) -> None:
        """Fix what is to be read as the tree is now. With the shared state's lock held."""
        self._tickets.put((ticket, [self._want(*want) for want in wants]))

    def close(self, timeout: float) -> None:
        self._closing = True
        self._tickets.put(None)
        self._thread.join(timeout)

    def _want(self, id: int, segment: bool, checkpoint: bool) -> Want:
        node = self._shared.catalogue.nodes.get(id)
        if node is None:
            return Want(id, None, None, True)
        s, c = node.segment if segment else None, node.checkpoint if checkpoint else None
        if (segment and s is None) or (checkpoint and c is None):
            return Want(id, None, None, True)
        for blob in (s, c):
            if blob is not None:
                blob.readers += 1
        return Want(
            id,
            PayloadSource(s, s.payload, node.lo, node.hi) if s else None,
            PayloadSource(c, c.payload) if c else None,
        )

    def _run(self) -> None:
        while (ticket := self._tickets.get()) is not None and not self._closing:
            number, wants = ticket
            try:
                event = self._load(number, wants)
            except Exception as error:
                self._shared.tell(
                    Trouble(f"The prefix cache could not be read: {error!r}.", "read")
                )
                event = PayloadsRead(number, None, [want.node for want in wants])
            finally:
                self._release(wants)
            self._shared.tell(event)

    def _load(self, ticket: int, wants: list[Want]) -> PayloadsRead:
        read: dict[int, Payload | None] = {}
        payloads: dict[int, tuple[Payload | None, Payload | None]] = {}
        failed = []
        for want in wants:
            sources = [s for s in (want.segment, want.checkpoint) if s is not None]
            for source in sources:
                if source.blob.id not in read:
                    read[source.blob.id] = source.payload or self._read(source.blob)
            if want.missing or any(read[s.blob.id] is None for s in sources):
                failed.append(want.node)
            else:
                payloads[want.node] = (_part(want.segment, read), _part(want.checkpoint, read))
        return PayloadsRead(ticket, payloads or None, failed)

    def _read(self, blob: Blob) -> Payload | None:
        try:
            return files.read(self._folder.file(blob.id), blob.size, blob.crc)
        except (OSError, files.Damaged) as error:
            self._shared.damaged(blob, str(error))
            return None

    def _release(self, wants: list[Want]) -> None:
        shared = self._shared
        with shared.lock:
            for want in wants:
                for source in (want.segment, want.checkpoint):
                    if source is not None:
                        source.blob.readers -= 1
            if shared.catalogue.trash:
                shared.ask()


def _part(source: PayloadSource | None, read: dict[int, Payload | None]) -> Payload | None:
    whole = read[source.blob.id] if source else None
    if source is None or whole is None:
        return None
    return files.cut(whole, source.lo, source.hi) if source.hi else whole
