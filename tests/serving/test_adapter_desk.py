"""Which adapters an engine is told of, and what becomes of their slots, without any engine."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from millrace.config import AdapterConfig
from millrace.errors import AdapterError, EngineUnavailable
from millrace.protocol import AdapterLoaded, AdapterRefused, LoadAdapter, ToEngine, UnloadAdapter
from millrace.serving import adapters
from millrace.serving.adapters import AdapterDesk, AdapterLibrary, AdapterList

used: list[int] = []
"""The slots that requests need."""


def on_a_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    @functools.wraps(test)
    def run() -> None:
        asyncio.run(test())

    return run


def desk_of(*names: str) -> tuple[AdapterDesk, list[ToEngine]]:
    sent: list[ToEngine] = []
    known = AdapterList([AdapterConfig(name=n, path=f"/{n}") for n in names])
    used.clear()
    return AdapterDesk(known, sent.append, lambda: used), sent


def loaded(slot: int, digest: str = "d") -> AdapterLoaded:
    return AdapterLoaded(slot, digest, 8, 4, 1000)


@on_a_loop
async def test_a_new_engine_is_told_all_and_a_quiet_one_nothing() -> None:
    desk, sent = desk_of("a", "b")
    desk.engine_ready()
    assert sent == [LoadAdapter(1, "a", "/a"), LoadAdapter(2, "b", "/b")]
    assert not desk.may_run(1) and desk.may_run(0)
    desk.heard(loaded(1, "da"))
    desk.heard(loaded(2, "db"))
    await desk.settled()
    assert desk.may_run(1) and desk.may_run(2)
    sent.clear()
    desk.engine_ready()
    assert sent == []
    desk.engine_gone()
    assert not desk.may_run(1)
    desk.engine_ready()
    assert sent == [LoadAdapter(1, "a", "/a", "da"), LoadAdapter(2, "b", "/b", "db")]


@on_a_loop
async def test_a_slot_is_free_when_the_last_request_has_left() -> None:
    desk, sent = desk_of("a")
    desk.engine_ready()
    desk.heard(loaded(1))
    old = desk.list.get("a")
    assert old is not None
    used.extend([1, 1, 2])
    load = asyncio.create_task(desk.load("a", "/new", in_place=True))
    await asyncio.sleep(0)
    assert sent[-1] == LoadAdapter(2, "a", "/new")
    desk.heard(loaded(2, "e"))
    await load
    new = desk.list.get("a")
    assert new is not None and new is not old and old.gone and desk.slot_of(new) == 2
    assert desk.running(old) == 2 and desk.running(new) == 1
    assert not any(isinstance(m, UnloadAdapter) for m in sent)
    desk.engine_gone()
    desk.engine_ready()  # a request that runs with the old one goes on with it
    assert {m.path for m in sent[-2:] if isinstance(m, LoadAdapter)} == {"/a", "/new"}
    desk.heard(loaded(1))
    desk.heard(loaded(2, "e"))
    used[:] = [2]
    desk.tidy()
    assert sent[-1] == UnloadAdapter(1)


@on_a_loop
async def test_a_load_that_fails_or_whose_engine_dies_leaves_nothing() -> None:
    desk, sent = desk_of()
    with pytest.raises(EngineUnavailable):
        await desk.load("early", "/x")
    desk.engine_ready()
    for end in ("refused", "died", "left"):
        load = asyncio.create_task(desk.load("x", "/x"))
        await asyncio.sleep(0)
        assert isinstance(sent[-1], LoadAdapter) and sent[-1].slot == 1
        if end == "refused":
            desk.heard(AdapterRefused(1, "invalid_adapter", "It is broken."))
            with pytest.raises(AdapterError, match="broken"):
                await load
        elif end == "died":
            assert desk.engine_gone() == set()
            with pytest.raises(EngineUnavailable):
                await load
            desk.engine_ready()
        else:
            load.cancel()
            with pytest.raises(asyncio.CancelledError):
                await load
            assert isinstance(sent[-1], LoadAdapter)  # the engine has yet to answer
            desk.heard(loaded(1))
            await asyncio.sleep(0.01)
        assert desk.list.all() == []
    assert sent[-1] == UnloadAdapter(1)


@on_a_loop
async def test_an_adapter_that_engines_die_of_is_given_up() -> None:
    desk, _ = desk_of("a")
    desk.engine_ready()
    assert desk.engine_gone() == set()
    desk.engine_ready()
    assert desk.engine_gone() == {1}
    with pytest.raises(AdapterError, match="died"):
        await desk.settled()


@on_a_loop
async def test_an_engines_death_counts_against_the_adapter_that_it_was_loading_alone() -> None:
    desk, _ = desk_of("a", "b", "c")
    for _ in range(2):
        desk.engine_ready()
        desk.heard(loaded(1))
        assert desk.engine_gone() == (set() if desk.list.all()[1].problem is None else {2})
    desk.engine_ready()
    a, b, c = desk.list.all()
    assert desk.slot_of(a) == 1 and desk.slot_of(c) == 3
    with pytest.raises(EngineUnavailable, match="Engines died"):
        desk.slot_of(b)


def test_an_adapter_that_engines_died_of_is_tried_again_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 1000.0
    monkeypatch.setattr(adapters.time, "monotonic", lambda: now)
    desk, sent = desk_of("a")
    (adapter,) = desk.list.all()
    for _ in range(2):
        desk.engine_ready()
        desk.engine_gone()
    desk.engine_ready()
    sent.clear()
    now += 30
    with pytest.raises(EngineUnavailable):
        desk.slot_of(adapter)
    now += 31
    assert desk.slot_of(adapter) == 1 and sent == [LoadAdapter(1, "a", "/a")]
    desk.engine_gone()
    assert adapter.problem is not None, "one more death is enough"
    now += 61
    desk.engine_ready()
    desk.slot_of(adapter)
    desk.heard(loaded(1))
    assert desk.may_run(1) and adapter.deaths == 0


@on_a_loop
async def test_files_that_changed_end_the_adapter_and_a_new_life_tries_again() -> None:
    desk, sent = desk_of("a")
    desk.engine_ready()
    desk.heard(loaded(1))
    desk.engine_gone()
    desk.engine_ready()
    error = desk.heard(AdapterRefused(1, "invalid_adapter", "Other files."))
    assert error is not None and error.message == "Other files."
    adapter = desk.list.get("a")
    assert adapter is not None and adapter.problem == "Other files."
    again = AdapterDesk(desk.list, sent.append, lambda: used)
    assert adapter.problem is None
    again.engine_ready()
    assert sent[-1] == LoadAdapter(1, "a", "/a", "d")


@on_a_loop
async def test_whoever_waits_for_adapters_hears_that_there_will_be_no_engine() -> None:
    desk, _ = desk_of("a")
    waiting = asyncio.create_task(desk.settled())
    await asyncio.sleep(0)
    desk.stopped()
    with pytest.raises(EngineUnavailable):
        await waiting


@on_a_loop
async def test_nobody_waits_for_an_adapter_that_was_unloaded_between_two_engines() -> None:
    desk, _ = desk_of("a")
    desk.engine_ready()
    waiting = asyncio.create_task(desk.settled())
    await asyncio.sleep(0)
    desk.engine_gone()
    await asyncio.sleep(0)
    assert desk.list.retire("a")
    desk.tidy()
    desk.engine_ready()
    async with asyncio.timeout(60):
        await waiting


def test_a_library_finds_adapters_of_all_models() -> None:
    library = AdapterLibrary()
    library.of("m", [AdapterConfig(name="a", path="/a")])
    library.of("n", [AdapterConfig(name="b", path="/b")])
    found = library.find(None, "nobody", "b")
    assert found is not None and found[0] == "n" and found[1].path == "/b"
    assert library.find("") is None and library.find(None) is None
    assert library.of("m").retire("a") and not library.of("m").retire("a")
    assert library.names() == ["b"]


@on_a_loop
async def test_a_name_that_two_models_load_at_once_is_the_first_ones() -> None:
    library, used_slots = AdapterLibrary(), list[int]()
    first, second = (
        AdapterDesk(library.of(model), lambda message: None, lambda: used_slots)
        for model in ("m", "n")
    )
    loads = []
    for desk in (first, second):
        desk.engine_ready()
        loads.append(asyncio.create_task(desk.load("x", "/x")))
    await asyncio.sleep(0)
    second.heard(loaded(1))
    await loads[1]
    first.heard(loaded(1))
    with pytest.raises(AdapterError, match="is taken"):
        await loads[0]
    found = library.find("x")
    assert found is not None and found[0] == "n"
