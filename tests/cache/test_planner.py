"""The planner against a search over all places: the best one that every layer can restore."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from millrace.cache.planner import Layers, RestorePlan, plan

PLACES = st.lists(st.integers(1, 60), max_size=6)


@given(st.integers(0, 60), st.integers(0, 60), PLACES)
def test_layers_that_can_be_cut_restore_all_that_is_known(
    known: int, limit: int, passed: list[int]
) -> None:
    assert plan(Layers(False), known, limit, passed) == RestorePlan(min(known, limit))


@given(st.integers(0, 60), st.integers(0, 60), PLACES, PLACES, st.none() | st.integers(1, 70))
def test_others_restore_at_the_best_place_there_is(
    known: int, limit: int, marks: list[int], more: list[int], window: int | None
) -> None:
    passed = [p for p in marks if p <= known]
    ahead = [p for p in more if p >= known]
    found = plan(Layers(True, window), known, limit, passed, ahead)
    most = min(known, limit)

    def possible(at: int) -> bool:
        if at in passed:
            return True
        marks = (p for p in (*passed, *ahead) if p >= at)
        return at == most and window is not None and any(p < window for p in marks)

    best = max((at for at in range(most + 1) if at == 0 or possible(at)), default=0)
    assert found.at == best
    if found.at:
        assert found.checkpoint is not None and found.checkpoint >= found.at
        assert found.checkpoint in (*passed, *ahead)
        if found.checkpoint > found.at:
            assert window is not None and found.checkpoint < window
