"""Who is loaded, who leaves, and what each may take: the policy alone, without a process."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hypothesis import given
from hypothesis import strategies as st

from millrace.serving.residency import (
    DRAIN_PATIENCE,
    Absent,
    Decision,
    Drain,
    Need,
    Place,
    Wish,
    decide,
    never_fits,
    pause_left,
    share,
)

LIMIT = 100


def _loaded(key: int, reserved: int, used: float = 0.0, **more: object) -> Place:
    return replace(Place(key, f"m{key}", reserved, "loaded", used), **more)  # type: ignore[arg-type]


def _wish(key: int, smallest: int, since: float = 0.0) -> Wish:
    return Wish(key, f"m{key}", Need(smallest - 1, 1), since)


def test_what_fits_is_started_beside_the_others() -> None:
    found = decide(LIMIT, [_loaded(1, 40)], [_wish(2, 50)], 0.0)
    assert [s.key for s in found.starts] == [2] and not found.ends


def test_the_least_recently_used_leaves_first_and_the_load_waits_for_it() -> None:
    places = [_loaded(1, 40, used=2.0), _loaded(2, 40, used=1.0)]
    found = decide(LIMIT, places, [_wish(3, 50)], 3.0)
    assert [(e.key, e.reason, e.sake) for e in found.ends] == [(2, "room", "m3")]
    assert not found.starts
    leaving = [places[0], replace(places[1], phase="leaving")]
    again = decide(LIMIT, leaving, [_wish(3, 50)], 3.0)
    assert again == Decision()
    assert [s.key for s in decide(LIMIT, places[:1], [_wish(3, 50)], 3.0).starts] == [3]


def test_nobody_leaves_where_that_would_not_make_room() -> None:
    places = [_loaded(1, 40, busy=True), _loaded(2, 40)]
    found = decide(LIMIT, places, [_wish(3, 90)], 0.0)
    assert not found.ends and found.look_again == DRAIN_PATIENCE


def test_busy_loading_and_pinned_models_are_never_evicted() -> None:
    for kept in (
        _loaded(1, 60, busy=True),
        replace(_loaded(1, 60), phase="loading"),
        _loaded(1, 60, pinned=True),
    ):
        for now in (0.0, 100.0):
            found = decide(LIMIT, [kept], [_wish(2, 50)], now)
            assert not found.ends and not found.starts


def test_one_in_use_for_long_takes_no_more_requests_once_another_has_waited() -> None:
    busy = _loaded(1, 60, busy=True)
    assert decide(LIMIT, [busy], [_wish(2, 50)], DRAIN_PATIENCE - 1).drains == ()
    assert decide(LIMIT, [busy], [_wish(2, 50)], DRAIN_PATIENCE).drains == (Drain(1, "m2"),)
    draining = replace(busy, draining=True)
    assert decide(LIMIT, [draining], [_wish(2, 50)], 99.0).drains == ()
    (end,) = decide(LIMIT, [replace(draining, busy=False)], [], 99.0).ends
    assert (end.key, end.reason) == (1, "room")


def test_the_first_who_waits_is_not_overtaken() -> None:
    found = decide(LIMIT, [_loaded(1, 60, busy=True)], [_wish(2, 50), _wish(3, 10)], 0.0)
    assert not found.starts


def test_what_can_never_fit_is_refused_and_holds_nobody_up() -> None:
    found = decide(LIMIT, [], [_wish(2, 101), _wish(3, 10)], 0.0)
    assert found.refused == (2,) and [s.key for s in found.starts] == [3]
    pinned = [_loaded(1, 60, pinned=True)]
    assert never_fits(Need(40, 1), LIMIT, pinned) and not never_fits(Need(39, 1), LIMIT, pinned)


def test_a_model_is_not_loaded_beside_its_own_last_life() -> None:
    old = replace(_loaded(1, 10, busy=True, draining=True), name="m")
    wish = Wish(2, "m", Need(9, 1), 0.0)
    assert not decide(LIMIT, [old], [wish], 0.0).starts
    assert not decide(LIMIT, [replace(old, phase="leaving")], [wish], 0.0).starts
    assert decide(LIMIT, [], [wish], 0.0).starts


def test_unused_models_expire_unless_pinned_or_in_use() -> None:
    assert decide(LIMIT, [_loaded(1, 10, used=5.0, ttl=10.0)], [], 14.0).look_again == 15.0
    (end,) = decide(LIMIT, [_loaded(1, 10, used=5.0, ttl=10.0)], [], 15.0).ends
    assert end.reason == "expired"
    (end,) = decide(LIMIT, [_loaded(1, 10, used=5.0, ttl=0.0)], [], 5.0).ends
    for kept in (_loaded(1, 10, ttl=1.0, pinned=True), _loaded(1, 10, ttl=1.0, busy=True)):
        assert decide(LIMIT, [kept], [], 99.0) == Decision()


def test_a_share_leaves_room_for_those_who_are_expected() -> None:
    need = Need(100, 10)
    assert share(need, 1100, Absent()) == 800
    assert share(need, 1100, Absent(200, 1)) == 320
    assert share(need, 400, Absent(450, 3)) == 60  # one of them
    assert share(need, 200, Absent(500, 3)) == 80  # none
    assert share(need, 110, Absent(500, 3)) == 10
    assert share(Need(100, 10, wanted=70), 1100, Absent()) == 70


def test_a_failed_load_is_remembered_for_a_while() -> None:
    assert pause_left(100.0, 110.0, 30.0) == 20.0 and pause_left(100.0, 200.0, 30.0) == 0.0


@dataclass
class World:
    """Carries out decisions as the registry does."""

    limit: int
    needs: dict[str, Need]
    places: dict[int, Place] = field(default_factory=dict)
    wishes: list[Wish] = field(default_factory=list)
    now: float = 0.0
    keys: int = 0

    def ask(self, name: str) -> None:
        if any(w.name == name for w in self.wishes) or any(
            p.name == name and not p.draining and p.phase != "leaving" for p in self.places.values()
        ):
            return
        self.keys += 1
        self.wishes.append(Wish(self.keys, name, self.needs[name], self.now))

    def act(self) -> Decision:
        found = decide(self.limit, list(self.places.values()), self.wishes, self.now)
        wishes = {w.key: w for w in self.wishes}
        for end in found.ends:
            place = self.places[end.key]
            assert place.phase == "loaded" and not place.busy
            assert not place.pinned
            self.places[end.key] = replace(place, phase="leaving")
        for drain in found.drains:
            place = self.places[drain.key]
            assert place.busy and not place.pinned
            self.places[drain.key] = replace(place, draining=True)
        for start in found.starts:
            wish = wishes[start.key]
            assert all(p.name != wish.name for p in self.places.values())
            assert start.reserved >= wish.need.smallest
            self.places[start.key] = Place(
                start.key, wish.name, start.reserved, "loading", self.now, busy=True
            )
        gone = {s.key for s in found.starts} | set(found.refused)
        self.wishes = [w for w in self.wishes if w.key not in gone]
        assert sum(p.reserved for p in self.places.values()) <= self.limit
        return found

    def settle(self) -> None:
        """Loads end, those who leave are gone, and those in use are done."""
        for key, place in list(self.places.items()):
            if place.phase == "leaving":
                del self.places[key]
            else:
                self.places[key] = replace(place, phase="loaded", busy=False)


SIZES = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 20)), min_size=2, max_size=5)


@given(SIZES, st.integers(40, 120), st.data())
def test_under_any_course_of_events_memory_holds_and_every_wish_is_served(
    sizes: list[tuple[int, int]], limit: int, data: st.DataObject
) -> None:
    names = [f"m{i}" for i in range(len(sizes))]
    world = World(limit, {n: Need(*size) for n, size in zip(names, sizes, strict=True)})
    for _ in range(data.draw(st.integers(1, 25))):
        match data.draw(st.sampled_from(["ask", "busy", "idle", "loaded", "gone", "time", "pin"])):
            case "ask":
                world.ask(data.draw(st.sampled_from(names)))
            case "time":
                world.now += data.draw(st.sampled_from([0.5, 3.0, 10.0]))
            case what if world.places:
                key = data.draw(st.sampled_from(sorted(world.places)))
                place = world.places[key]
                if what == "gone" and place.phase == "leaving":
                    del world.places[key]
                elif what == "loaded" and place.phase == "loading":
                    world.places[key] = replace(place, phase="loaded")
                elif what in ("busy", "idle") and not place.draining:
                    world.places[key] = replace(place, busy=what == "busy", used=world.now)
                elif what == "pin" and place.phase == "loaded":
                    world.places[key] = replace(place, pinned=not place.pinned)
        world.act()
    for key, place in world.places.items():
        world.places[key] = replace(place, pinned=False)
    first = world.wishes[0].name if world.wishes else None
    for _ in range(12 * len(names)):
        world.settle()
        world.now += 1.0
        world.act()
    assert not world.wishes, first
