"""The load generator against a scripted server: timing, failures, loops, interleaving, the CLI."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path
from typing import Any

import pytest
import typer
from fake_openai import Fake, Script, Step, answer, delta, finish, serve, serve_in_thread, usage
from typer.testing import CliRunner

from millrace.bench.lengths import Fixed
from millrace.bench.load import Wire, body, closed_loop, make_client, open_loop, send
from millrace.bench.plot import check_plot
from millrace.bench.runner import RunPlan, run
from millrace.bench.samples import BenchTarget, Level, RequestSample, Results
from millrace.bench.workload import Item, WorkloadMessage, WorkloadShape
from millrace.cli.bench import register
from millrace.errors import SetupError

ITEM = Item(messages=(WorkloadMessage("user", "hi"),), max_tokens=4)


def target(fake: Fake, name: str = "a") -> BenchTarget:
    return BenchTarget(name=name, url=f"{fake.url}/v1", model="fake", api_key="secret")


def one(script: Script, **wire: Any) -> tuple[RequestSample, Fake]:
    async def go() -> tuple[RequestSample, Fake]:
        async with serve(script) as fake, make_client() as http:
            return await send(http, target(fake), Wire(**wire), ITEM), fake

    return asyncio.run(go())


def test_first_token_is_timed_at_the_first_text_not_at_the_role() -> None:
    sample, fake = one(lambda n, body: answer(3, first=0.3, gap=0.1))
    assert sample.ok
    assert sample.ttft is not None
    assert 0.29 <= sample.ttft < 0.6
    assert len(sample.gaps) == 2
    assert all(0.08 <= gap < 0.3 for gap in sample.gaps)
    assert sample.e2e >= 0.49
    assert (sample.prompt_tokens, sample.tokens, sample.finish_reason) == (100, 3, "length")
    body = fake.bodies[0]
    assert body["stream"] is True
    assert body["stream_options"] == {"include_usage": True}
    assert "ignore_eos" not in body
    assert fake.headers[0]["authorization"] == "Bearer secret"


def test_wishes_for_specprefill_are_sent_where_somebody_chose() -> None:
    plain = json.loads(body(ITEM, "m", Wire()))
    assert not [name for name in plain if name.startswith("specprefill")]
    asked = json.loads(body(ITEM, "m", Wire(specprefill=True, specprefill_keep_pct=0.2)))
    assert asked["specprefill"] is True and asked["specprefill_keep_pct"] == 0.2
    assert json.loads(body(ITEM, "m", Wire(specprefill=False)))["specprefill"] is False


def test_reasoning_and_tools_count_as_text_and_events_stand_in_for_usage() -> None:
    call = {"index": 0, "function": {"name": "f", "arguments": "{}"}}
    steps = [
        delta(role="assistant"),
        ("raw", b": keep-alive\n\n"),
        ("sleep", 0.1),
        delta(reasoning_content="hm"),
        delta(tool_calls=[call]),
        finish("tool_calls"),
        ("done", None),
    ]
    sample, fake = one(lambda n, body: steps, ignore_eos=True)
    assert sample.ttft is not None
    assert sample.ttft >= 0.09
    assert (sample.tokens, sample.completion_tokens) == (2, None)
    assert fake.bodies[0]["ignore_eos"] is True


@pytest.mark.parametrize(
    ("steps", "kind", "status"),
    [
        ([("status", 429)], "rejected", 429),
        ([("status", 500)], "http", 500),
        ([delta(content="a"), ("cut", None)], "cut", None),
        ([delta(content="a"), ("end", None)], "cut", None),
        ([delta(content="a"), ("sleep", 5)], "timeout", None),
        ([("event", {"error": {"message": "as scripted"}})], "stream_error", None),
        ([("raw", b"data: {oops\n\n")], "bad_stream", None),
    ],
)
def test_every_failure_has_its_kind(steps: list[Step], kind: str, status: int | None) -> None:
    sample, _ = one(lambda n, body: steps, timeout=0.5 if kind == "timeout" else 60)
    assert sample.failure is not None
    assert (sample.failure.kind, sample.failure.status) == (kind, status)
    if kind in ("rejected", "http", "stream_error"):
        assert sample.failure.message == "as scripted"


def test_a_stream_that_finishes_without_done_is_whole() -> None:
    sample, _ = one(lambda n, body: [delta(content="a"), finish(), usage(9, 1), ("end", None)])
    assert sample.ok


def test_nobody_listening_is_a_connect_failure() -> None:
    async def go() -> RequestSample:
        async with make_client() as http:
            nowhere = BenchTarget(name="x", url="http://127.0.0.1:9/v1", model="m")
            return await send(http, nowhere, Wire(), ITEM)

    sample = asyncio.run(go())
    assert sample.failure is not None
    assert sample.failure.kind == "connect"


def test_closed_loop_keeps_so_many_running_and_no_more() -> None:
    async def go() -> tuple[list[RequestSample], Fake]:
        samples: list[RequestSample] = []
        async with serve(lambda n, body: answer(2, first=0.03)) as fake, make_client() as http:
            await closed_loop(
                http,
                target(fake),
                Wire(),
                [ITEM] * 10,
                clients=3,
                number=0,
                record=samples.append,
            )
            return samples, fake

    samples, fake = asyncio.run(go())
    assert len(samples) == 10
    assert fake.most == 3


def test_open_loop_sends_on_time_however_slow_the_server_is() -> None:
    items = [Item(messages=ITEM.messages, max_tokens=2, arrival=i * 0.05) for i in range(6)]

    async def go() -> tuple[list[RequestSample], Fake]:
        samples: list[RequestSample] = []
        async with serve(lambda n, body: answer(2, first=0.6)) as fake, make_client() as http:
            await open_loop(http, target(fake), Wire(), items, number=0, record=samples.append)
            return samples, fake

    def on_time() -> bool:
        samples, fake = asyncio.run(go())
        starts = sorted(s.started for s in samples)
        return fake.most == 6 and abs(starts[-1] - starts[0] - 0.25) < 0.1

    assert any(on_time() for _ in range(5)), "a machine may stall now and then, not always"


def plan(fakes: list[Fake], **fields: Any) -> RunPlan:
    base: dict[str, Any] = {
        "targets": [
            BenchTarget(name=f"t{i}", url=f"{fake.url}/v1", model="")
            for i, fake in enumerate(fakes)
        ],
        "levels": [Level(clients=1), Level(clients=2)],
        "shape": WorkloadShape(prompt=Fixed(60), output=Fixed(4)),
        "wire": Wire(),
        "requests": 8,
    }
    return RunPlan(**(base | fields))


def test_a_run_alternates_the_targets_and_sends_them_the_same() -> None:
    order: list[str] = []

    async def go() -> tuple[Results, Fake, Fake]:
        async with serve(lambda n, b: answer(4)) as a, serve(lambda n, b: answer(4)) as b:
            todo = plan([a, b])
            results = Results.empty(list(todo.targets), todo.levels)
            await run(todo, results, lambda what, s: None if s else order.append(what))
            return results, a, b

    results, a, b = asyncio.run(go())
    assert [len(cell.samples) for cell in results.cells] == [8, 8, 8, 8]
    assert {t.model for t in results.targets} == {"fake"}
    texts = [[body["messages"][0]["content"] for body in fake.bodies] for fake in (a, b)]
    assert sorted(texts[0]) == sorted(texts[1])
    assert len(set(texts[0])) == 17
    first = [what for what in order if what.startswith("1 client")]
    assert first[:4] == ["1 client · t0", "1 client · t1", "1 client · t1", "1 client · t0"]


def test_a_target_that_refuses_everything_ends_the_run_with_its_own_words() -> None:
    async def go() -> None:
        async with serve(lambda n, body: [("status", 400)]) as fake:
            todo = plan([fake])
            results = Results.empty(list(todo.targets), todo.levels)
            await run(todo, results, lambda what, s: None)

    with pytest.raises(SetupError, match="HTTP 400: as scripted"):
        asyncio.run(go())


def test_a_target_that_is_not_there_ends_the_run() -> None:
    todo = plan([Fake(lambda n, body: [], port=9)])
    with pytest.raises(SetupError, match="does not answer"):
        asyncio.run(run(todo, Results.empty(list(todo.targets), todo.levels), lambda w, s: None))


def test_calibration_sizes_prompts_by_the_servers_count() -> None:
    def script(n: int, body: dict[str, Any]) -> list[Step]:
        words = len(body["messages"][0]["content"].split())
        return answer(1, prompt=3 * words + 20)

    async def go() -> Results:
        async with serve(script) as fake:
            todo = plan(
                [fake],
                calibrate=True,
                levels=[Level(clients=1)],
                shape=WorkloadShape(prompt=Fixed(500), output=Fixed(1)),
            )
            results = Results.empty(list(todo.targets), todo.levels)
            await run(todo, results, lambda what, s: None)
            return results

    for sample in asyncio.run(go()).cells[0].samples:
        assert sample.prompt_tokens == pytest.approx(500, rel=0.03)


def invoke(*words: str) -> Any:
    app = typer.Typer()

    @app.callback()
    def root() -> None:
        pass

    register(app)
    return CliRunner().invoke(app, ["bench", *words])


def test_the_command_makes_a_table_json_and_both_kinds_of_plot(tmp_path: Path) -> None:
    def flaky(n: int, body: dict[str, Any]) -> list[Step]:
        return [("status", 429 if n % 2 else 500)] if n % 4 else answer(4, gap=0.002)

    fast = serve_in_thread(lambda n, body: answer(4, gap=0.001))
    with fast as a, serve_in_thread(flaky) as b:
        for suffix in ("png", "svg"):
            out = tmp_path / f"p.{suffix}"
            result = invoke(
                *("--target", f"fast={a.url}", "--target", f"flaky={b.url}/v1"),
                *("--clients", "1,2", "--requests", "8", "--api-key", "fast=hidden"),
                *("--json", str(tmp_path / "r.json"), "--raw", "--plot", str(out)),
                *("--slo-ttft", "60s", "--warmup", "4"),
            )
            assert result.exit_code == 0, result.output
            assert out.stat().st_size > 5000
    assert "flaky / fast" in result.output
    assert "rejected (429)" in result.output
    assert "HTTP 500" in result.output
    text = (tmp_path / "r.json").read_text()
    assert "hidden" not in text
    found = json.loads(text)
    first, second = found["levels"][0]["results"]
    assert first["summary"]["goodput"]["share"] == 1.0
    assert first["summary"]["output_tokens"] == 32
    assert second["summary"]["rejected"] == 4
    assert len(second["samples"]) == 8


def test_open_loop_and_trace_from_the_command_line(tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    lines = [{"prompt": f"p{i}", "max_tokens": 3, "arrival": i * 0.01} for i in range(5)]
    trace.write_text("\n".join(map(json.dumps, lines)))
    with serve_in_thread(lambda n, body: answer(3)) as fake:
        replay = invoke("--target", f"x={fake.url}", "--trace", str(trace), "--warmup", "0")
        assert replay.exit_code == 0, replay.output
        assert "trace arrivals" in replay.output
        assert [body["max_tokens"] for body in fake.bodies] == [3] * 5
        rate = invoke("--target", f"x={fake.url}", "--rate", "200", "--requests", "6")
        assert rate.exit_code == 0, rate.output
        assert "200 requests/s" in rate.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--clients", "2", "--rate", "3"), "choose one"),
        (("--plot", "x.pdf"), ".png or .svg"),
        (("--prompt-tokens", "many"), "--prompt-tokens"),
        (("--target", "a=http://127.0.0.1:9"), "does not answer"),
    ],
)
def test_the_command_refuses_in_words(words: tuple[str, ...], message: str) -> None:
    result = invoke(*words)
    assert isinstance(result.exception, SetupError)
    assert message in result.exception.message


def test_an_interrupt_reports_what_was_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    from millrace.bench import runner

    whole = runner.run

    async def interrupted(todo: RunPlan, results: Results, watch: Any) -> None:
        def stop(what: str, sample: RequestSample | None) -> None:
            watch(what, sample)
            if sum(len(cell.samples) for cell in results.cells) == 3:
                signal.raise_signal(signal.SIGINT)

        await whole(todo, results, stop)

    monkeypatch.setattr(runner, "run", interrupted)
    with serve_in_thread(lambda n, body: answer(4)) as fake:
        result = invoke("--target", f"x={fake.url}", "--clients", "1", "--requests", "9")
    assert result.exit_code == 130
    assert "3 requests were measured" in result.output
    assert "generated tokens/s" in result.output


def test_a_plot_without_matplotlib_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SetupError, match=r"millrace-server\[plot\]"):
        check_plot(Path("p.png"))
