"""The keeper and its client against an engine that the test plays: nothing it does ends the service."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from millrace.errors import (
    BadRequest,
    EngineUnavailable,
    MillraceError,
    ModelError,
    RequestFailed,
)
from millrace.flight import FlightReading
from millrace.protocol import (
    Abort,
    Choice,
    Failed,
    FromEngine,
    Ready,
    RowTokens,
    Step,
    Submit,
    ToEngine,
    encoder,
)
from millrace.serving import keeper
from millrace.serving.admission import Admission
from millrace.serving.client import EngineClient
from millrace.serving.connection import EngineGone, Garbled, decoded
from millrace.serving.in_flight import InFlight
from millrace.serving.keeper import State
from millrace.serving.metrics import Metrics
from millrace.serving.suspicion import Cause

READY = Ready(512, "cpu", "float32", 128, 0.1, 1, 1, 1)


class Played:
    """A connection whose engine says what the test puts into `inbox`."""

    pid = None

    def __init__(self) -> None:
        self.inbox: asyncio.Queue[FromEngine | Exception] = asyncio.Queue()
        self.sent: list[ToEngine] = []
        self.working: tuple[int, ...] = ()
        self.closes: asyncio.Event | None = None
        """What holds it up where it is given no time for its end."""
        self.closing = self.closed = False

    def send(self, message: ToEngine) -> None:
        self.sent.append(message)

    async def receive(self) -> FromEngine:
        said = await self.inbox.get()
        if isinstance(said, Exception):
            raise said
        return said

    def reading(self) -> FlightReading | None:
        return FlightReading(requests=self.working)

    def kill(self, why: str, cause: Cause) -> None:
        self.inbox.put_nowait(EngineGone(why, cause))

    async def close(self, grace: float) -> None:
        self.closing = True
        if self.closes is not None and not grace:
            await self.closes.wait()
        self.closed = True


class Stage:
    """A client, and the engines that were launched for it."""

    def __init__(self) -> None:
        self.engines: list[Played] = []
        self.trouble: list[Exception] = []
        """What the next launches fail with."""
        self.problem: str | None = None
        """What is wrong with the model's files."""
        self.reported: list[MillraceError] = []
        self.client = EngineClient(
            self._launch,
            Admission(8, 8),
            Metrics().of("played"),
            diagnose=lambda: self.problem,
        )
        self.client.when_failed = self.reported.append

    async def _launch(self) -> Played:
        if self.trouble:
            raise self.trouble.pop(0)
        self.engines.append(Played())
        return self.engines[-1]

    def say(self, *messages: FromEngine | Exception) -> None:
        for message in messages:
            self.engines[-1].inbox.put_nowait(message)

    def submit(self, id: str) -> InFlight:
        return self.client.submit(id, Submit(0, [1, 2, 3], [Choice(0, 7)], 50))

    async def until(self, met: Callable[[], object]) -> None:
        async with asyncio.timeout(120):
            while not met():
                await asyncio.sleep(0.005)

    async def heard(self) -> None:
        await self.until(lambda: self.engines[-1].inbox.empty())
        await asyncio.sleep(0.01)


def play(scene: Callable[[Stage], Awaitable[Any]]) -> None:
    async def run() -> None:
        stage = Stage()
        await stage.client.start()
        stage.say(READY)
        await stage.until(lambda: stage.client.state is State.READY)
        try:
            await scene(stage)
        finally:
            await stage.client.stop()

    asyncio.run(run())


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper, "SHORTEST_PAUSE", 0.01)
    monkeypatch.setattr(keeper, "LONGEST_PAUSE", 0.02)


def test_a_request_goes_on_where_it_was() -> None:
    async def scene(stage: Stage) -> None:
        active = stage.submit("a")
        stage.say(Step([RowTokens(active.number, 0, [5, 6])]), EngineGone("gone", Cause.KILL))
        await stage.until(lambda: len(stage.engines) == 2)
        assert stage.client.why is not None
        stage.say(READY)
        await stage.until(lambda: stage.engines[-1].sent)
        again = stage.engines[-1].sent[0]
        assert isinstance(again, Submit)
        assert again.choices[0].generated == [5, 6]
        assert stage.client.why is None

    play(scene)


def test_an_engine_that_is_let_go_of_when_the_end_comes_is_let_go_of_whole() -> None:
    async def scene(stage: Stage) -> None:
        lost = stage.engines[-1]
        lost.closes = asyncio.Event()
        stage.say(EngineGone("gone", Cause.KILL))
        await stage.until(lambda: lost.closing)
        assert not lost.closed
        await stage.client.stop()
        assert lost.closed

    play(scene)


def test_no_two_run_under_one_name_though_one_has_parts() -> None:
    async def scene(stage: Stage) -> None:
        parts = [stage.submit("a#0"), stage.submit("a#1")]
        with pytest.raises(BadRequest, match="'a' is running"):
            stage.submit("a")
        whole = stage.submit("b")
        with pytest.raises(BadRequest, match="'b#0' is running"):
            stage.submit("b#0")
        for active in (*parts, whole):
            active.close()

    play(scene)


def test_restarts_go_on_whatever_they_fail_of(caplog: pytest.LogCaptureFixture) -> None:
    async def scene(stage: Stage) -> None:
        active = stage.submit("a")
        stage.trouble = [OSError(24, "Too many open files"), RuntimeError("odd"), ValueError()] * 4
        stage.say(EngineGone("gone", Cause.KILL))
        await stage.until(lambda: "Too many" in (stage.client.why or ""))
        await stage.until(lambda: len(stage.engines) == 2)
        for _ in range(keeper.REFUSALS - 1):
            stage.say(Failed("model_error", "There is no memory."), EngineGone("status 3"))
            count = len(stage.engines)
            await stage.until(lambda count=count: len(stage.engines) > count)  # type: ignore[misc]
            assert "There is no memory" in (stage.client.why or "")
            assert stage.client.state is State.RESTARTING
        stage.say(READY)
        await stage.until(lambda: stage.engines[-1].sent)
        assert active.open

    play(scene)


async def _fails(stage: Stage, active: InFlight, words: str) -> None:
    """Requests end with the reason, and no more are taken."""
    await stage.until(lambda: stage.client.state is State.FAILED)
    with pytest.raises((ModelError, EngineUnavailable), match=words):
        _ = list(active.unread())
    with pytest.raises((ModelError, EngineUnavailable), match=words):
        stage.client.admit(1)
    assert stage.reported and words in stage.reported[0].message


def test_files_that_are_gone_end_the_attempts_at_once() -> None:
    async def scene(stage: Stage) -> None:
        active = stage.submit("a")
        stage.problem = "The folder is missing."
        stage.say(EngineGone("gone", Cause.KILL))
        await _fails(stage, active, "The folder is missing")
        assert len(stage.engines) == 1, "no further engine is started"

    play(scene)


def test_a_model_that_engines_refuse_again_and_again_is_given_up() -> None:
    async def scene(stage: Stage) -> None:
        active = stage.submit("a")
        stage.say(EngineGone("gone", Cause.KILL))
        for count in range(2, keeper.REFUSALS + 2):
            await stage.until(lambda count=count: len(stage.engines) == count)  # type: ignore[misc]
            stage.say(Failed("model_error", "It does not load."), EngineGone("status 3"))
        await _fails(stage, active, "It does not load")

    play(scene)


def test_engines_that_end_before_they_are_ready_are_given_up() -> None:
    async def scene(stage: Stage) -> None:
        active = stage.submit("a")
        stage.say(EngineGone("gone", Cause.KILL))
        for count in range(2, keeper.RESTARTS + 2):
            await stage.until(lambda count=count: len(stage.engines) == count)  # type: ignore[misc]
            stage.say(EngineGone("it ended with status 1"))
        await _fails(stage, active, "it ended with status 1")

    play(scene)


def test_a_keeper_that_fails_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    async def scene(stage: Stage) -> None:
        active = stage.submit("a")
        stage.say(RuntimeError("a bug"))
        await stage.until(lambda: "a bug" in (stage.client.why or ""))
        await stage.until(lambda: len(stage.engines) == 2)
        stage.say(READY)
        await stage.until(lambda: stage.engines[-1].sent)
        assert active.open
        assert "a bug" in caplog.text

    play(scene)


def test_a_message_that_cannot_be_handled_costs_its_own_request() -> None:
    async def scene(stage: Stage) -> None:
        bad, good = stage.submit("bad"), stage.submit("good")

        def broken(row: RowTokens) -> None:
            raise KeyError("a bug")

        bad.take = broken  # type: ignore[method-assign]
        rows = [RowTokens(bad.number, 0, [5]), RowTokens(good.number, 0, [6])]
        stage.say(Step(rows))
        await stage.heard()
        with pytest.raises(RequestFailed):
            _ = list(bad.unread())
        assert good.generated == {0: [6]}
        assert list(stage.client.in_flight.values()) == [good]
        stage.say(Garbled(Step(rows[1:]), [good.number + 7]))
        await stage.heard()
        assert good.generated == {0: [6, 6]}
        assert len(stage.engines) == 1

    play(scene)


def test_a_request_that_cannot_be_encoded_is_refused_and_not_listed() -> None:
    async def scene(stage: Stage) -> None:
        with pytest.raises(BadRequest):
            stage.client.submit("a", Submit(0, [1], [Choice(0, 1 << 70)], 5))
        assert stage.client.in_flight == {}
        stage.submit("a")

    play(scene)


def test_what_kills_engines_ends_and_says_why() -> None:
    async def scene(stage: Stage) -> None:
        bad, good = stage.submit("bad"), stage.submit("good")
        for deaths in (1, 2):
            stage.engines[-1].working = (bad.number,)
            stage.say(EngineGone("it was killed by signal 6"))
            await stage.until(lambda deaths=deaths: len(stage.engines) > deaths)  # type: ignore[misc]
            stage.say(READY)
            await stage.until(lambda: stage.engines[-1].sent)
        with pytest.raises(EngineUnavailable, match="died 2 times"):
            _ = list(bad.unread())
        assert list(stage.client.in_flight.values()) == [good]

    play(scene)


def test_a_model_that_cannot_be_loaded_fails_the_first_start() -> None:
    async def run() -> None:
        stage = Stage()
        await stage.client.start()
        stage.say(Failed("model_error", "No such model."), EngineGone("status 3"))
        with pytest.raises(ModelError, match="No such model"):
            await stage.client.settled()
        assert stage.client.state is State.FAILED
        with pytest.raises(ModelError):
            stage.client.admit(1)
        await stage.client.stop()

    asyncio.run(run())


def test_what_is_left_of_a_garbled_message_is_used() -> None:
    fields = msgspec.msgpack.decode(encoder.encode(Step([RowTokens(3, 0, [5])])))
    fields["rows"].append([4, 0, "no tokens"])
    with pytest.raises(Garbled) as caught:
        decoded(msgspec.msgpack.encode(fields))
    assert caught.value.requests == [4]
    assert caught.value.step.rows == [RowTokens(3, 0, [5])]
    with pytest.raises(EngineGone):
        decoded(b"\xc1nothing")


def test_an_engine_is_given_no_more_than_a_queue_holds_and_the_rest_as_others_end() -> None:
    async def scene(stage: Stage) -> None:
        parts = [stage.submit(f"wide#{n}") for n in range(40)]
        sent = stage.engines[-1].sent
        assert [m.id for m in sent if isinstance(m, Submit)] == [p.number for p in parts[:16]]
        stage.say(Step([RowTokens(parts[n].number, 0, [5], "stop") for n in range(3)]))
        await stage.heard()
        assert [m.id for m in sent if isinstance(m, Submit)] == [p.number for p in parts[:19]]
        assert stage.client.cancel("wide") == 37
        await stage.until(lambda: not stage.client.in_flight)
        aborted = [m.id for m in sent if isinstance(m, Abort)]
        assert sorted(aborted) == [
            p.number for p in parts[3:19]
        ]  # the others the engine has never had

    play(scene)


def test_after_a_death_the_new_engine_is_given_no_more_either() -> None:
    async def scene(stage: Stage) -> None:
        parts = [stage.submit(f"wide#{n}") for n in range(40)]
        stage.say(EngineGone("it was killed by signal 9", Cause.KILL))
        await stage.until(lambda: len(stage.engines) == 2)
        stage.say(READY)
        await stage.until(lambda: len(stage.engines[-1].sent) == 16)
        again = [m.id for m in stage.engines[-1].sent if isinstance(m, Submit)]
        assert again == [p.number for p in parts[:16]]

    play(scene)
