"""Which models are held in memory: who is loaded next, who must go first, and what each may take.

Pure: facts in, a decision out, for whoever has the processes to carry out. A model in memory is a
place; one that was asked for and has no memory yet is a wish. Wishes are served in the order in which
they came, each once there is room for it, so that none waits for ever behind others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

DRAIN_PATIENCE = 5.0
"""Seconds that a wish waits for models in use to become idle; then one of them takes no more requests."""
LOAD_PAUSE = 30.0
"""Seconds for which a load that failed is not tried again, unless somebody asks for just that."""
STATE_SHARE = 0.8
"""The part of what is left beside the weights that state may take; work needs the rest."""

Reason = Literal["room", "expired", "asked"]
"""Why a model leaves: for another's sake, unused for long enough, told to."""


@dataclass(frozen=True)
class Need:
    """Bytes that a model takes: weights and process, and state of requests and of their prefixes."""

    fixed: int
    least: int
    """State without which it is of no use."""
    wanted: int | None = None
    """State that somebody has chosen for it; None takes a share of what there is."""

    @property
    def smallest(self) -> int:
        return self.fixed + (self.least if self.wanted is None else self.wanted)


@dataclass(frozen=True)
class Place:
    """A model that holds memory, or will until its process has ended."""

    key: int
    name: str
    reserved: int
    phase: Literal["loading", "loaded", "leaving"]
    used: float
    """When it was last in use."""
    busy: bool = False
    """Somebody has it, waits for it, or is about to."""
    pinned: bool = False
    ttl: float | None = None
    """Seconds without use after which it leaves; None stays."""
    draining: bool = False
    """It takes no more requests, and leaves when it has answered those it has."""

    @property
    def free(self) -> bool:
        return self.phase == "loaded" and not self.busy

    @property
    def expires(self) -> float | None:
        """When it leaves, if nobody uses it before."""
        if self.ttl is None or self.pinned or not self.free:
            return None
        return self.used + self.ttl


@dataclass(frozen=True)
class Wish:
    """A model that was asked for."""

    key: int
    name: str
    need: Need
    since: float


@dataclass(frozen=True)
class ModelStart:
    key: int
    reserved: int
    state: int
    """Bytes of it for state."""


@dataclass(frozen=True)
class End:
    key: int
    reason: Reason
    sake: str = ""
    """The model that needs the room."""


@dataclass(frozen=True)
class Drain:
    key: int
    sake: str


@dataclass(frozen=True)
class Decision:
    starts: tuple[ModelStart, ...] = ()
    ends: tuple[End, ...] = ()
    drains: tuple[Drain, ...] = ()
    """Models in use that are to take no more requests."""
    refused: tuple[int, ...] = ()
    """Wishes that can never have room."""
    look_again: float | None = None
    """When something is due although nothing happens."""


@dataclass(frozen=True)
class Absent:
    """The models that are expected beside one that is loaded."""

    fixed: int = 0
    count: int = 0


def never_fits(need: Need, limit: int, places: Sequence[Place]) -> bool:
    """Whether there is no room although all that may leave had left."""
    return need.smallest + sum(p.reserved for p in places if p.pinned) > limit


def share(need: Need, room: int, absent: Absent) -> int:
    """Bytes of state for a model that gets its place in so much room.

    Those that are expected too are left an even part: all of them, or as many as can have one.
    """
    if need.wanted is not None:
        return need.wanted
    spare = room - need.fixed
    for others in range(absent.count, 0, -1):
        even = (spare - absent.fixed * others // absent.count) // (others + 1)
        if even >= need.least:
            break
    else:
        even = spare
    return min(spare, max(need.least, int(STATE_SHARE * even)))


def decide(
    limit: int,
    places: Sequence[Place],
    wishes: Sequence[Wish],
    now: float,
    absent: Callable[[str], Absent] = lambda name: Absent(),
) -> Decision:
    """What is to be done now. `absent` tells whom a model that is loaded should leave room for."""
    ends = [End(p.key, "expired") for p in places if p.expires is not None and p.expires <= now]
    gone = {e.key for e in ends}
    ends += [End(p.key, "room") for p in places if p.draining and p.free and p.key not in gone]
    leaving = {e.key for e in ends} | {p.key for p in places if p.phase == "leaving"}
    starts: list[ModelStart] = []
    refused: list[int] = []
    drains: list[Drain] = []
    due = [p.expires for p in places if p.expires is not None and p.key not in leaving]
    taken = sum(p.reserved for p in places)
    starting: set[str] = set()
    for wish in wishes:
        if never_fits(wish.need, limit, places):
            refused.append(wish.key)
            continue
        twin = wish.name in starting or any(p.name == wish.name for p in places)
        free = limit - taken
        if wish.need.smallest <= free and not twin:
            state = share(wish.need, free, absent(wish.name))
            starts.append(ModelStart(wish.key, wish.need.fixed + state, state))
            taken += wish.need.fixed + state
            starting.add(wish.name)
            continue
        # The first who must wait holds up those behind: they could take what it waits for.
        coming = sum(p.reserved for p in places if p.key in leaving or p.name == wish.name)
        missing = wish.need.smallest - free - coming
        victims = _victims(places, leaving, missing, wish.name)
        if victims is not None:
            ends += [End(p.key, "room", wish.name) for p in victims]
        elif now >= wish.since + DRAIN_PATIENCE:
            keys = _drained(places, leaving, missing, wish.name)
            drains += [Drain(key, wish.name) for key in keys]
        else:
            due.append(wish.since + DRAIN_PATIENCE)
        break
    return Decision(
        tuple(starts), tuple(ends), tuple(drains), tuple(refused), min(due, default=None)
    )


def _victims(
    places: Sequence[Place], leaving: set[int], missing: int, name: str
) -> list[Place] | None:
    """The idle ones, unused for longest, that make room together; None where they do not."""
    chosen: list[Place] = []
    for place in sorted(places, key=lambda p: p.used):
        if missing <= 0:
            break
        if place.free and not place.pinned and place.key not in leaving and place.name != name:
            chosen.append(place)
            missing -= place.reserved
    return chosen if missing <= 0 else None


def _drained(places: Sequence[Place], leaving: set[int], missing: int, name: str) -> list[int]:
    """Those in use that will make room when they are done, besides the idle ones and those asked to."""
    idle = [p for p in places if p.free and not p.pinned and p.key not in leaving]
    asked = [p for p in places if p.draining and p.key not in leaving]
    missing -= sum({p.key: p.reserved for p in (*idle, *asked)}.values())
    chosen: list[int] = []
    for place in sorted(places, key=lambda p: p.used):
        if missing <= 0:
            break
        busy = place.phase == "loaded" and place.busy and not place.draining
        if busy and not place.pinned and place.key not in leaving and place.name != name:
            chosen.append(place.key)
            missing -= place.reserved
    return chosen


def pause_left(failed: float, now: float, pause: float = LOAD_PAUSE) -> float:
    """Seconds until a load that failed then may be tried again."""
    return max(0.0, failed + pause - now)
