"""When state in memory goes to disk. Pure: times come in, nothing is looked up.

Most prompts are never sent again, and a disk wears: state waits until a second request has used it,
or until the engine has nothing else to do. Whatever is written keeps to a rate.
"""

from __future__ import annotations

from millrace.cache.eviction import worth
from millrace.cache.operations import Operation, WriteDisk, WriteState
from millrace.cache.radix import Node, RadixTree

SHARED_AFTER = 1.0
"""Seconds after its making that state goes to disk, if a second request has used it."""
SHARED_BUSY = 10.0
"""The same while rows are running."""
IDLE_AFTER = 5.0
"""Seconds without work after which all else goes, too."""
RATE = 64 << 20
"""Bytes a second that are written in the long run."""
BURST = 256 << 20
"""Bytes that may be written at once after a pause."""
WRITE_AHEAD = 64 << 20
"""Bytes that may be on their way to the disk before less urgent writes wait."""
EVICT_AHEAD = 4 * WRITE_AHEAD
"""The same for state that is about to leave the memory."""
LOOK_EVERY = 0.5
"""Seconds between looks at what is to be written."""
_SOON = 0.05


def due(node: Node, made: float, now: float, idle_for: float | None) -> bool:
    """Whether a node's state should be on disk. `idle_for`: seconds without work, None if busy."""
    if idle_for is not None and idle_for >= IDLE_AFTER:
        return True
    wait = SHARED_BUSY if idle_for is None else SHARED_AFTER
    return 2 * node.shared >= len(node.tokens) and now - made >= wait


class Allowance:
    """How many bytes may be written: refilled at a rate, up to a burst.

    What is larger than the allowance may go while there is some left, and is paid off afterwards.
    """

    def __init__(self, rate: int = RATE, burst: int = BURST) -> None:
        self._rate = rate
        self._burst = burst
        self._left = float(burst)
        self._at: float | None = None

    def left(self, now: float) -> float:
        if self._at is not None:
            passed = max(0.0, now - self._at)
            self._left = min(float(self._burst), self._left + self._rate * passed)
        self._at = now
        return self._left

    def spend(self, nbytes: int, now: float) -> None:
        self.left(now)
        self._left -= nbytes

    def wait(self, now: float) -> float:
        """Seconds until there is some left."""
        return max(0.0, -self.left(now) / self._rate)


class WriteBack:
    """What the disk does not have yet, and what of it goes there next."""

    def __init__(self, tree: RadixTree, on: bool) -> None:
        self._tree = tree
        self._on = on
        self._unwritten: dict[int, float] = {}
        """When nodes that the disk does not have in full were made."""
        self._allowance = Allowance()
        self._idle_since: float | None = None
        self._look_at = 0.0
        self.backlog = 0
        """Bytes that wait to be written, as far as is known."""

    def made(self, node: Node, now: float) -> None:
        if self._on:
            self._unwritten[node.id] = now

    def cut(self, node: Node, upper: Node) -> None:
        if node.id in self._unwritten and not node.stored:
            self._unwritten[upper.id] = self._unwritten[node.id]

    def merged(self, upper: Node, lower: Node, into: Node, now: float) -> None:
        times = [self._unwritten.pop(n.id, now) for n in (upper, lower)]
        if self._on:
            self._unwritten[into.id] = min(times)

    def forget(self, id: int) -> None:
        self._unwritten.pop(id, None)

    def clear(self) -> None:
        self._unwritten.clear()

    def off(self) -> None:
        """The disk takes no more writes."""
        self._on = False
        self._unwritten.clear()

    def tick(self, out: list[Operation], now: float, *, idle: bool) -> float | None:
        """Hand over what is due. Returns in how many seconds to call again."""
        if not idle:
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = now
        if not self._unwritten:
            return None
        if now < self._look_at:
            return self._look_at - now
        idle_for = None if self._idle_since is None else now - self._idle_since
        for id, made in list(self._unwritten.items()):
            node = self._tree.nodes[id]
            if id not in self._unwritten or not due(node, made, now, idle_for):
                continue
            if self.backlog > WRITE_AHEAD or self._allowance.left(now) <= 0:
                self._look_at = now + max(_SOON, self._allowance.wait(now))
                return self._look_at - now
            self.write_line(out, node, now)
        self._look_at = now + LOOK_EVERY
        return LOOK_EVERY if self._unwritten else None

    def save(self, out: list[Operation], node: Node, now: float) -> None:
        """A node is about to leave the memory: the disk may have it, within the rate."""
        if self._on and self.backlog <= EVICT_AHEAD and self._allowance.left(now) > 0:
            self.write_line(out, node, now)

    def close(self, out: list[Operation], now: float, most: int) -> None:
        """Hand over all that is left, what is worth most first, up to `most` bytes."""
        nodes = [self._tree.nodes[id] for id in self._unwritten]
        nodes.sort(key=lambda n: -worth(n.end, self._tree.held(n), now - n.used))
        nodes.sort(key=lambda n: 2 * n.shared < len(n.tokens))
        for node in nodes:
            if most > 0:
                most -= self.write_line(out, node, now)

    def write_line(self, out: list[Operation], node: Node, now: float) -> int:
        """Hand a node to the disk, and before it those that it builds on; returns the bytes."""
        line = node.line()
        if not all(n.resident or n.stored for n in line):
            return 0
        nbytes = sum(self._write(out, n) for n in line)
        self._allowance.spend(nbytes, now)
        self.backlog += nbytes
        return nbytes

    def _write(self, out: list[Operation], node: Node) -> int:
        self._unwritten.pop(node.id, None)
        sizes = self._tree.sizes
        nbytes = 0
        checkpoint = node.checkpoint and not node.checkpoint_stored
        if checkpoint:
            nbytes += sizes.checkpoint(node.end)
        if node.stored:
            if checkpoint:
                out.append(WriteState(node.id))
        else:
            assert node.parent is not None
            nbytes += sizes.per_token * len(node.tokens)
            out.append(
                WriteDisk(
                    node.id,
                    node.parent.id,
                    node.salt,
                    tuple(node.tokens),
                    sizes.per_token > 0,
                    checkpoint,
                )
            )
        node.stored = True
        node.checkpoint_stored |= checkpoint
        return nbytes

    def check(self) -> None:
        assert all(id in self._tree.nodes for id in self._unwritten)
