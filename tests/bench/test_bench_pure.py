"""The load generator's pure parts: statistics, workload, options, events, order of rounds."""

from __future__ import annotations

import math
import random
import statistics
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.bench.discover import fit
from millrace.bench.interleave import rounds_for, turns
from millrace.bench.lengths import Fixed, Lognormal, Uniform, draw, parse_length
from millrace.bench.options import parse_duration, parse_numbers, parse_prefix, parse_targets
from millrace.bench.samples import Failure, RequestSample
from millrace.bench.sse import Events, read_chunk
from millrace.bench.stats import Slo, percentile, spread, summarise, window
from millrace.bench.trace import read_trace
from millrace.bench.workload import Item, Sizing, WorkloadShape, generate, poisson, split
from millrace.errors import SetupError

numbers = st.floats(min_value=0, max_value=1e6, allow_nan=False)


def sample(**fields: object) -> RequestSample:
    base: dict[str, object] = {"round": 0, "started": 0.0, "e2e": 1.0, "max_tokens": 8}
    return RequestSample(**(base | fields))  # type: ignore[arg-type]


@given(st.lists(numbers, min_size=2, max_size=60))
def test_percentiles_equal_the_standard_librarys(values: list[float]) -> None:
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    found = spread(values)
    assert found is not None
    for got, cut in ((found.p50, cuts[49]), (found.p90, cuts[89]), (found.p99, cuts[98])):
        assert math.isclose(got, cut, rel_tol=1e-9, abs_tol=1e-6)
    assert math.isclose(found.mean, statistics.fmean(values), rel_tol=1e-9, abs_tol=1e-9)
    assert found.max == max(values)


@given(st.lists(numbers, min_size=1, max_size=60), st.floats(0, 1))
def test_a_percentile_lies_within_the_values_and_never_falls(
    values: list[float], share: float
) -> None:
    ordered = sorted(values)
    found = percentile(ordered, share)
    assert ordered[0] <= found <= ordered[-1]
    assert percentile(ordered, share / 2) <= found


def test_no_values_have_no_spread() -> None:
    assert spread([]) is None


def test_window_adds_the_rounds_and_leaves_out_the_time_between_them() -> None:
    samples = [
        sample(round=0, started=10.0, e2e=2.0),
        sample(round=0, started=11.0, e2e=3.0),
        sample(round=1, started=100.0, e2e=1.0),
    ]
    assert window(samples) == pytest.approx(5.0)
    assert window([]) == 0.0


def test_summary_counts_tokens_of_successes_and_goodput_of_all() -> None:
    rejected = Failure(kind="rejected", status=429)
    broken = Failure(kind="http", status=500)
    samples = [
        sample(ttft=0.1, gaps=(0.1, 0.1), events=3, completion_tokens=8, prompt_tokens=50),
        sample(ttft=0.9, gaps=(0.1, 0.1), events=3),
        sample(ttft=0.1, gaps=(0.1, 5.0), events=3, completion_tokens=4),
        sample(failure=rejected),
        sample(ttft=0.1, events=3, failure=broken),
    ]
    found = summarise(samples, Slo(ttft=0.5, itl=1.0))
    assert (found.requests, found.succeeded, found.rejected) == (5, 3, 1)
    assert found.errors == {"HTTP 500": 1}
    assert found.output_tokens == 8 + 3 + 4
    assert found.tokens_per_s == pytest.approx(15.0)
    assert found.short == 2
    assert found.goodput is not None
    assert found.goodput.good == 1
    assert found.goodput.share == pytest.approx(0.2)
    assert summarise(samples, Slo()).goodput is None
    assert summarise([], Slo(e2e=1)).tokens_per_s == 0.0


shapes = st.builds(
    WorkloadShape,
    prompt=st.one_of(
        st.builds(Fixed, st.integers(1, 400)),
        st.builds(lambda a, b: Uniform(min(a, b), max(a, b)), st.integers(1, 99), st.just(300)),
        st.builds(Lognormal, st.floats(1, 300), st.floats(0, 1.5)),
    ),
    output=st.just(Uniform(4, 9)),
    prefix_tokens=st.sampled_from([0, 50]),
    prefix_share=st.sampled_from([0.5, 1.0]),
    chat=st.booleans(),
)


@settings(max_examples=30)
@given(shapes, st.integers(0, 2**40))
def test_a_seed_makes_the_same_requests_and_no_prompt_twice(
    shape: WorkloadShape, seed: int
) -> None:
    first = generate(shape, 12, seed, "level0")
    assert first == generate(shape, 12, seed, "level0")
    assert first[:5] == generate(shape, 5, seed, "level0")
    other = generate(shape, 12, seed, "level1")
    texts = [i.messages[0].content if i.messages else i.prompt for i in first + other]
    assert len(set(texts)) == 24
    assert all(4 <= item.max_tokens <= 9 for item in first)


def test_unshared_prompts_differ_from_the_start_and_shared_ones_agree() -> None:
    alone = generate(WorkloadShape(prompt=Fixed(200), output=Fixed(8), chat=False), 50, 3, "x")
    assert len({(item.prompt or "")[:16] for item in alone}) == 50
    shape = WorkloadShape(prompt=Fixed(200), output=Fixed(8), chat=False, prefix_tokens=100)
    shared = generate(shape, 20, 3, "x") + generate(shape, 20, 3, "y")
    assert len({(item.prompt or "")[:300] for item in shared}) == 1
    assert len({item.prompt for item in shared}) == 40


def test_sizing_sets_the_number_of_words() -> None:
    shape = WorkloadShape(
        prompt=Fixed(230), output=Fixed(8), sizing=Sizing(tokens_per_word=2.0, overhead=30.0)
    )
    message = (generate(shape, 1, 0, "x")[0].messages or ())[0]
    assert 100 <= len(message.content.split()) <= 130
    assert fit((60, 260), (90, 330)) == Sizing(tokens_per_word=1.2, overhead=18.0)


@settings(max_examples=25)
@given(st.floats(0.1, 1000), st.integers(0, 2**40))
def test_poisson_arrivals_rise_and_keep_the_rate(rate: float, seed: int) -> None:
    items = [Item(prompt="x", max_tokens=1)] * 2000
    arrivals = [item.arrival or 0.0 for item in poisson(items, rate, seed, "s")]
    assert arrivals == sorted(arrivals)
    assert arrivals[0] > 0
    gaps = [b - a for a, b in zip([0.0, *arrivals], arrivals, strict=False)]
    mean = statistics.fmean(gaps)
    assert mean == pytest.approx(1 / rate, rel=0.15)
    # The gaps of a Poisson process spread as widely as they are long.
    assert statistics.pstdev(gaps) == pytest.approx(1 / rate, rel=0.25)


@given(st.integers(1, 40), st.integers(1, 12))
def test_split_keeps_every_request_and_the_total_time(count: int, rounds: int) -> None:
    items = poisson([Item(prompt=str(i), max_tokens=1) for i in range(count)], 5.0, count, "s")
    parts = split(items, rounds)
    assert [item.prompt for part in parts for item in part] == [item.prompt for item in items]
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    total = sum(part[-1].arrival or 0.0 for part in parts)
    assert total == pytest.approx(items[-1].arrival)


@given(st.integers(1, 6), st.integers(1, 9))
def test_every_target_has_every_round_and_each_leads_in_turn(targets: int, rounds: int) -> None:
    order = turns(targets, rounds)
    assert sorted(order) == [(r, t) for r in range(rounds) for t in range(targets)]
    assert [r for r, _ in order] == sorted(r for r, _ in order)
    assert [order[r * targets][1] for r in range(rounds)] == [r % targets for r in range(rounds)]


def test_rounds_leave_every_client_enough_to_do() -> None:
    assert rounds_for(32, 4, 1) == 1
    assert rounds_for(32, 4, 2) == 4
    assert rounds_for(32, 16, 2) == 1
    assert rounds_for(4, 16, 2) == 1
    assert rounds_for(1000, None, 3) == 5


@given(st.integers(0, 2**30))
def test_lengths_stay_in_their_range(seed: int) -> None:
    rng = random.Random(seed)
    assert draw(parse_length("--x", "230"), rng) == 230
    assert 100 <= draw(parse_length("--x", "100:300"), rng) <= 300
    assert 1 <= draw(parse_length("--x", "lognormal:20:3"), rng) <= 20 * 16


@pytest.mark.parametrize("text", ["0", "-3", "a", "9:3", "0:3", "lognormal:5", "lognormal:0:1", ""])
def test_bad_lengths_are_named(text: str) -> None:
    with pytest.raises(SetupError, match="--prompt-tokens"):
        parse_length("--prompt-tokens", text)


def test_targets_take_urls_models_and_keys() -> None:
    a, b = parse_targets(["a=http://x:1", "b=https://y/api/v1/"], ["b=org/m=1", "plain"], ["a=k=1"])
    assert (a.url, a.model, a.api_key) == ("http://x:1/v1", "plain", "k=1")
    assert (b.url, b.model, b.api_key) == ("https://y/api/v1", "org/m=1", None)
    (c,) = parse_targets(["127.0.0.1:8000"], [], [])
    assert (c.name, c.url) == ("127.0.0.1:8000", "http://127.0.0.1:8000/v1")
    with pytest.raises(SetupError, match="twice"):
        parse_targets(["a=http://x", "a=http://y"], [], [])
    with pytest.raises(SetupError, match="NAME=URL"):
        parse_targets(["a=ftp://x"], [], [])


def test_other_options() -> None:
    assert parse_numbers("--clients", "1,4,16", int) == [1, 4, 16]
    assert parse_duration("--slo-ttft", "500ms") == 0.5
    assert parse_duration("--slo-ttft", "2s") == parse_duration("--slo-ttft", "2") == 2.0
    assert parse_prefix("500:0.8") == (500, 0.8)
    assert parse_prefix("500") == (500, 1.0)
    for bad in ("0", "1,x", "", "inf", "nan"):
        with pytest.raises(SetupError, match="--rate"):
            parse_numbers("--rate", bad, float)
    for bad in ("fast", "0", "-1s"):
        with pytest.raises(SetupError, match="--slo-itl"):
            parse_duration("--slo-itl", bad)
    for bad in ("x", "0", "5:2", "5:0"):
        with pytest.raises(SetupError, match="--shared-prefix"):
            parse_prefix(bad)


@given(st.lists(st.sampled_from(["data: {}", ": ping", "event: x", "data:b"])), st.data())
def test_events_do_not_depend_on_how_bytes_are_cut(lines: list[str], data: st.DataObject) -> None:
    wire = "".join(f"{line}\r\n\r\n" for line in lines).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(wire)), max_size=6)))
    events, got = Events(), []
    for low, high in zip([0, *cuts], [*cuts, len(wire)], strict=True):
        got += events.feed(wire[low:high])
    wanted = {"data: {}": b"{}", "data:b": b"b"}
    assert got == [wanted[line] for line in lines if line in wanted]


@pytest.mark.parametrize(
    ("choice", "text"),
    [
        ('{"delta":{"role":"assistant","content":""}}', False),
        ('{"delta":{"content":null}}', False),
        ('{"delta":{"content":" a"}}', True),
        ('{"delta":{"reasoning_content":"hm"}}', True),
        ('{"delta":{"reasoning":"hm"}}', True),
        ('{"delta":{"tool_calls":[{"index":0,"function":{"name":"f","arguments":""}}]}}', True),
        ('{"delta":{"tool_calls":[{"index":0,"function":{"arguments":""}}]}}', False),
        ('{"text":"a"}', True),
        ('{"text":""}', False),
    ],
)
def test_only_generated_text_counts(choice: str, text: bool) -> None:
    assert read_chunk(f'{{"choices":[{choice}]}}'.encode()).text is text


def test_trace_lines(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(
        '{"prompt": "late", "max_tokens": 4, "arrival": 2}\n\n'
        '{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "arrival": 0.5}\n'
    )
    first, second = read_trace(path, chat=True)
    assert (first.arrival, first.max_tokens) == (0.5, 5)
    assert second.messages is not None
    assert second.messages[0].content == "late"
    with pytest.raises(SetupError, match="line 3: messages need"):
        read_trace(path, chat=False)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no request"),
        ('{"max_tokens": 3}', "either messages or prompt"),
        ('{"prompt": "x"}', "max_tokens"),
        ('{"prompt": "x", "max_tokens": 0}', "at least 1"),
        ("{", "line 1"),
        ('{"prompt":"x","max_tokens":1,"arrival":1}\n{"prompt":"x","max_tokens":1}', "1 of 2"),
    ],
)
def test_bad_traces_say_where(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(text)
    with pytest.raises(SetupError, match=words):
        read_trace(path, chat=True)
