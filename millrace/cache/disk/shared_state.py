"""What the engine's thread, the writer and the reader share, behind one lock.

The lock is held for work in memory only, never over the disk: the engine's thread takes it too.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from millrace.cache.disk.catalogue import DiskCatalogue
from millrace.cache.disk.events import Dropped, Event, Trouble
from millrace.cache.disk.records import Blob


class SharedState:
    def __init__(self, catalogue: DiskCatalogue) -> None:
        self.lock = threading.Lock()
        self.work = threading.Condition(self.lock)
        """Something for the writer to do, or the writer has done it."""
        self.catalogue = catalogue
        self.queue: deque[Blob] = deque()
        """Files to write, in order."""
        self.backlog = 0
        self.asked = 0
        self.done = 0
        """Calls that change something, and how many of them are on disk."""
        self.writable = True
        self.deadline: float | None = None
        """When closing: the time to stop writing, on the monotonic clock."""
        self._events: list[Event] = []
        self._reported: set[tuple[str, bool]] = set()
        self._wakeup: Callable[[], None] | None = None

    def ask(self) -> None:
        """Have the writer look. With the lock held."""
        self.asked += 1
        self.work.notify_all()

    def say(self, *events: Event) -> None:
        """With the lock held; `wake` once it is not."""
        for event in events:
            if isinstance(event, Trouble):
                if (event.kind, event.off) in self._reported:
                    continue
                self._reported.add((event.kind, event.off))
            if isinstance(event, Dropped) and not event.nodes:
                continue
            self._events.append(event)

    def tell(self, *events: Event) -> None:
        with self.lock:
            self.say(*events)
        self.wake()

    def wake(self) -> None:
        call = self._wakeup
        if call is not None and self._events:
            call()

    def give_up(self, kind: str, message: str) -> None:
        """No more writes; what is on disk can still be read."""
        with self.lock:
            self.writable = False
            dropped: list[int] = []
            while self.queue:
                blob = self.queue.popleft()
                self.backlog -= blob.size
                blob.payload = None
                dropped += self.catalogue.withdraw(blob)
            self.say(Trouble(message, kind, off=True), Dropped(dropped))
        self.wake()

    def damaged(self, blob: Blob, why: str) -> None:
        """A file is not what was written: nothing that needs it can stay."""
        with self.lock:
            self.say(
                Trouble(f"A file of the prefix cache is damaged and was dropped: {why}.", "damage"),
                Dropped(self.catalogue.drop(list(blob.users))),
            )
            self.ask()
        self.wake()

    def poll(self) -> list[Event]:
        if not self._events:
            return []
        with self.lock:
            events, self._events = self._events, []
        return events

    def set_wakeup(self, call: Callable[[], None]) -> None:
        self._wakeup = call
