"""Ten minutes of figures, and the requests that ended last: rings that stay small."""

from __future__ import annotations

from typing import Any

from millrace.serving.history import EndedRequest, EndedRequests, History, HistorySample, Reading


def test_counters_become_rates_and_levels_stay_levels() -> None:
    history = History()
    history.record(100.0, 1.0, Reading(generated_tokens=50, running=2))
    sample = history.record(
        102.0, 2.0, Reading(generated_tokens=90, prefilled_tokens=7, cached_tokens=3, waiting=4)
    )
    assert (sample.generated, sample.prefilled, sample.cached) == (20.0, 3.5, 1.5)
    assert (sample.running, sample.waiting, sample.time) == (0, 4, 102.0)


def test_what_was_counted_before_the_first_sample_is_no_rate() -> None:
    assert History().record(1.0, 1.0, Reading(generated_tokens=10**9)).generated == 0


def test_no_time_between_two_samples_is_no_error() -> None:
    history = History()
    history.record(1.0, 1.0, Reading())
    assert history.record(1.0, 0.0, Reading(generated_tokens=5)).generated == 0


def test_the_ring_keeps_the_last_and_its_columns_are_all_fields() -> None:
    history = History(seconds=3)
    for second in range(5):
        history.record(float(second), 1.0, Reading(running=second))
    columns = history.columns()
    assert set(columns) == set(HistorySample.__struct_fields__)
    assert columns["time"] == columns["running"] == [2, 3, 4]


def _ended(id: str) -> EndedRequest:
    fields: dict[str, Any] = dict.fromkeys(EndedRequest.__struct_fields__, 0)
    return EndedRequest(**fields | {"id": id})


def test_the_newest_of_the_ended_come_first_and_the_oldest_are_forgotten() -> None:
    ended = EndedRequests(most=3)
    for number in range(5):
        ended.add(_ended(str(number)))
    assert [e.id for e in ended.newest(10)] == ["4", "3", "2"]
    assert [e.id for e in ended.newest(1)] == ["4"]
    assert ended.newest(0) == []
