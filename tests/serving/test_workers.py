"""Text work in processes: the same results and refusals as on a thread, and faults that stay there."""

from __future__ import annotations

import dataclasses
import errno
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from millrace import worker_pool as pool
from millrace.errors import BadRequest, ContextLengthExceeded, EngineUnavailable, MillraceError
from millrace.serving import workers as module
from millrace.serving.workers import TextDesk
from millrace.text.conversation import Conversation
from millrace.text.grammar import Demand
from millrace.text.tasks import (
    ChatTask,
    CountTask,
    EncodeTask,
    FormTask,
    OpeningTask,
    RenderTask,
    TextSide,
    TextSideConfig,
    size_of,
)

TOOL = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {"at": {}}}},
}
CHAT = Conversation(
    messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi 😀"}]
)
SCHEMA = Demand("schema", {"type": "object", "required": ["a"]}, "response_format")


@pytest.fixture(scope="module")
def side(default_model: Path) -> TextSide:
    return TextSide(TextSideConfig(folder=str(default_model), window=512))


@pytest.fixture(scope="module")
def desk(side: TextSide) -> Iterator[TextDesk]:
    made = TextDesk(side)
    yield made
    made.close()


@pytest.fixture
def all_in_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LARGE", 0)


def big(number: int) -> Conversation:
    return dataclasses.replace(CHAT, template_arguments={"number": number})


@pytest.mark.parametrize(
    "task",
    [
        ChatTask(chat=CHAT),
        ChatTask(chat=big(2**80), demand=SCHEMA, boundaries=False),
        ChatTask(chat=dataclasses.replace(CHAT, tools=[TOOL], tool_choice="required")),
        CountTask(chat=CHAT, demand=SCHEMA),
        OpeningTask(CHAT),
        RenderTask(chat=CHAT, special=True),
        EncodeTask(texts=["one", "two 😀"]),
        FormTask(Demand("choice", ["yes", "no"], "guided_choice")),
    ],
)
def test_a_worker_brings_what_a_thread_brings(
    side: TextSide, desk: TextDesk, all_in_workers: None, task: Any
) -> None:
    assert desk.run(task) == task.run(side)
    assert desk._workers.pids()


@pytest.mark.parametrize(
    "task",
    [
        ChatTask(chat=Conversation(messages=[{"role": "user", "content": "long " * 2000}])),
        ChatTask(chat=Conversation(messages=[{"role": "user", "content": "long " * 50000}])),
        EncodeTask(texts=["x" * 100_000]),
        FormTask(Demand("regex", "(", "guided_regex")),
        FormTask(Demand("schema", {"type": "object", "required": "😀" * 200}, "guided_json")),
        FormTask(Demand("schema", {"not": {}}, "guided_json")),
    ],
)
def test_a_worker_refuses_what_a_thread_refuses(
    side: TextSide, desk: TextDesk, all_in_workers: None, task: Any
) -> None:
    with pytest.raises(MillraceError) as here:
        task.run(side)
    with pytest.raises(MillraceError) as there:
        desk.run(task)
    assert type(here.value) is type(there.value)
    assert isinstance(there.value, BadRequest)
    assert vars(here.value) == vars(there.value)
    assert str(here.value) == str(there.value)


def test_small_things_start_no_process(side: TextSide) -> None:
    desk = TextDesk(side)
    desk.run(ChatTask(chat=CHAT))
    assert desk._workers.pids() == []


def test_what_cannot_fit_is_refused_without_being_tokenised(
    side: TextSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(side.tokenizer, "encode", lambda *_, **__: pytest.fail("tokenised"))
    with pytest.raises(ContextLengthExceeded, match="at least") as refused:
        EncodeTask(texts=["words " * 100_000]).run(side)
    monkeypatch.undo()
    assert refused.value.prompt_tokens <= len(side.tokenizer.encode("words " * 100_000))


def test_a_worker_that_dies_is_replaced_and_its_task_done_by_the_next(
    desk: TextDesk, all_in_workers: None
) -> None:
    desk.run(EncodeTask(texts=["one"]))
    for pid in desk._workers.pids():
        os.kill(pid, signal.SIGKILL)
    assert desk.run(EncodeTask(texts=["two"])) == desk.run(EncodeTask(texts=["two"]))


def test_a_task_that_kills_workers_fails_alone(
    desk: TextDesk, all_in_workers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def ask(worker: Any, task: Any, patience: float) -> Any:
        asked.append(worker.pid)
        worker.kill()
        return ordinary(worker, task, patience)

    ordinary = pool._Worker.ask
    monkeypatch.setattr(pool._Worker, "ask", ask)
    with pytest.raises(MillraceError) as error:
        desk.run(EncodeTask(texts=["one"]))
    assert error.value.status == 500 and len(set(asked)) > 1
    monkeypatch.undo()
    monkeypatch.setattr(module, "LARGE", 0)
    assert desk.run(EncodeTask(texts=["still here"]))


def test_a_task_that_takes_too_long_ends(
    desk: TextDesk, all_in_workers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.run(EncodeTask(texts=["one"]))
    for pid in desk._workers.pids():
        os.kill(pid, signal.SIGSTOP)
    monkeypatch.setattr(module, "PATIENCE", 0.01)
    with pytest.raises(MillraceError) as error:
        desk.run(EncodeTask(texts=["one"]))
    assert error.value.code == "timeout"
    monkeypatch.undo()
    assert desk.run(EncodeTask(texts=["still here"]))


def test_a_task_whose_worker_is_stopped_is_given_to_another(
    desk: TextDesk, all_in_workers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.run(EncodeTask(texts=["one"]))
    stopped = desk._workers.pids()
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    monkeypatch.setattr(pool, "_LOOK_SECONDS", 0.05)
    assert desk.run(EncodeTask(texts=["still here"]))
    assert not set(stopped) & set(desk._workers.pids())


def test_a_worker_that_is_stopped_for_a_moment_is_kept(
    desk: TextDesk, all_in_workers: None
) -> None:
    desk.run(EncodeTask(texts=["one"]))
    (worker,) = desk._workers.pids()
    os.kill(worker, signal.SIGSTOP)
    timer = threading.Timer(0.3, os.kill, (worker, signal.SIGCONT))
    timer.start()
    assert desk.run(EncodeTask(texts=["still here"]))
    assert desk._workers.pids() == [worker]


def test_a_worker_that_cannot_be_started_is_told_as_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(pool.subprocess, "Popen", refuse)
    with pytest.raises(EngineUnavailable, match="cannot be started: .*Cannot allocate memory"):
        pool.WorkerPool(["-c", ""], most=1, work="large prompt").run([b""], 1.0)


def test_workers_end_with_the_desk(side: TextSide, all_in_workers: None) -> None:
    desk = TextDesk(side)
    desk.run(EncodeTask(texts=["one"]))
    (pid,) = desk._workers.pids()
    desk.close()
    with pytest.raises(EngineUnavailable):
        desk.run(EncodeTask(texts=["two"]))
    with pytest.raises(ChildProcessError):
        while os.waitpid(pid, os.WNOHANG) == (0, 0):
            time.sleep(0.01)
        os.waitpid(pid, 0)


def test_sizes_stop_counting_where_it_is_enough() -> None:
    assert size_of("abc") == 19
    assert size_of({"a": ["b", 1]}) > size_of({"a": ["b"]})
    endless = [["x"] * 1000] * 10_000
    assert size_of(endless) < 2 * (1 << 20)


def test_of_small_things_few_run_at_a_time_and_none_waits_for_a_grammar(
    side: TextSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    running: list[str] = []
    most: list[int] = []
    go_on = threading.Event()

    def encode(task: EncodeTask, side: TextSide) -> list[list[int]]:
        running.append("text")
        most.append(running.count("text"))
        time.sleep(0.01)
        running.remove("text")
        return [[1]]

    def form(task: FormTask, side: TextSide) -> str:
        running.append("grammar")
        assert go_on.wait(30)
        return ""

    monkeypatch.setattr(EncodeTask, "run", encode)
    monkeypatch.setattr(FormTask, "run", form)
    desk = TextDesk(side)
    with ThreadPoolExecutor(24) as pool:
        slow = [pool.submit(desk.run, FormTask(SCHEMA)) for _ in range(8)]
        quick = [pool.submit(desk.run, EncodeTask(texts=["a"])) for _ in range(24)]
        assert [future.result(30) for future in quick] == [[[1]]] * 24
        assert not any(future.done() for future in slow)
        go_on.set()
    assert max(most) == module.AT_ONCE
    desk.close()
