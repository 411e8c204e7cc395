"""`auto`: the best model that fits is fetched and served; without a hub, one that is here is taken."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import fake_hub
import pytest
from conftest import Server, until
from fake_hub import Hub
from models import short_name_shapes as shapes

from millrace.cli.better_model import BetterModel
from millrace.models import auto, blas, store, suggestions
from millrace.models.short_names import ShortName, find

MEMORY = 4 * 10**9
SENTENCE = "small built-in model"


@pytest.fixture(scope="module")
def best() -> ShortName:
    found = suggestions.recommended(MEMORY)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def hub(best: ShortName, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    """One that has the best model in a tiny shape."""
    folder = shapes.text_model(best.architecture, tmp_path_factory.mktemp("best") / "m")
    with fake_hub.serving({best.source: fake_hub.files_of(folder)}) as running:
        yield running


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, default_model: Path) -> dict[str, str]:
    """A machine that has the built-in model alone; the environment of processes on it."""
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "smollm2").symlink_to(default_model)
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "127.0.0.1")
    monkeypatch.setenv("MILLRACE_HOME", str(tmp_path))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return {"MILLRACE_HOME": str(tmp_path), "HF_HUB_CACHE": str(tmp_path / "hub")}


def test_the_best_is_fetched_and_served_and_later_without_a_network(
    own: dict[str, str], hub: Hub, best: ShortName
) -> None:
    server = Server("auto", "--memory", str(MEMORY), env=own | hub.env).wait_ready()
    try:
        assert f"{best.name} is the best model that fits into 4.0 GB" in server.log()
        assert f"serves {best.name} at" in server.shown()
        assert SENTENCE not in server.shown()
        library = server.http.get("/v1/library").json()
        assert library["builtin"] is False and library["recommended"]["name"] == best.name
        (row,) = [s for s in library["suggested"] if s["recommended"]]
        assert row["name"] == best.name and row["installed"] is True
        for name in (best.name, best.source, best.name.replace("-", ":")):
            body = {"model": name, "prompt": "a", "max_tokens": 2}
            answer = server.post("/v1/completions", body)
            assert answer.status_code == 200 and answer.json()["model"] == best.name, answer.text
    finally:
        server.stop()
    hub.asked.clear()
    again = Server("auto", "--memory", str(MEMORY), env=own).wait_ready()
    try:
        assert f"serves {best.name} at" in again.shown()
    finally:
        again.stop()


def test_without_a_network_the_built_in_model_is_served_and_said_to_be(own: dict[str, str]) -> None:
    server = Server("auto", "--memory", str(MEMORY), env=own).wait_ready()
    try:
        assert "http://127.0.0.1:9 does not answer; the small built-in model" in server.log()
        assert "serves smollm2 at" in server.shown()
        assert until(lambda: "for trying things out" in server.shown())
        assert server.http.get("/v1/library").json()["builtin"] is True
    finally:
        server.stop()


def test_the_start_of_the_built_in_model_names_a_better_one(
    own: dict[str, str], hub: Hub, best: ShortName
) -> None:
    env = own | hub.env
    server = Server("--memory", str(MEMORY), env=env).wait_ready()
    try:
        named = f"The best model for this machine is {best.name} ("
        assert until(lambda: named in server.shown()), server.shown()
        assert f"serve {best.name}\n" in server.shown()
    finally:
        server.stop()


def test_a_hub_that_is_slow_delays_nothing_and_is_not_asked_twice(
    own: dict[str, str],
    hub: Hub,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setattr(auto, "ask", lambda model, ask=auto.ask: ask(model, 60.0))
    hub.open.clear()
    hub.asked.clear()
    shown = ""

    def printed(text: str, times: int = 1) -> bool:
        nonlocal shown
        shown += capsys.readouterr().out
        return shown.count(text) == times

    BetterModel(MEMORY, "millrace").show()
    assert printed("smollm2 is the small built-in model, for trying things out.")
    assert "The best model" not in shown
    hub.open.set()
    assert until(lambda: printed("The best model for this machine is"))
    assert len(hub.asked) == 1
    BetterModel(MEMORY, "millrace").show()
    assert until(lambda: printed("The best model for this machine is", 2))
    assert len(hub.asked) == 1, "the answer is remembered"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    shown = ""
    BetterModel(MEMORY, "millrace").show()
    assert printed("With a network, millrace serve auto fetches a better one.")
    assert until(lambda: "better-model" not in {t.name for t in threading.enumerate()})
    assert printed("The best model for this machine is", 0), "no hub is to be asked"


def test_a_hub_without_the_best_is_asked_for_the_next(
    own: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    second = suggestions.choices(MEMORY)[1]
    with fake_hub.serving({second.source: {}}) as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        assert auto.choose(MEMORY).name == second.name
        assert len(running.asked) == 2
    assert auto.choose(10**8).name is None
    assert "fits into 100 MB" in auto.choose(10**8).reason


def test_a_hub_that_has_none_is_said_to_have_none(
    own: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with fake_hub.serving({}) as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        choice = auto.choose(MEMORY)
    assert choice.name is None
    assert f"{running.url} has none of the best models that fit;" in choice.reason


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.9\r\n",
        b"",
    ],
    ids=["sign-in page", "busy", "another protocol", "nothing"],
)
def test_what_is_no_answer_of_a_hub_is_taken_as_silence(
    own: dict[str, str],
    best: ShortName,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    answer: bytes,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def reply() -> None:
            with listener.accept()[0] as connection:
                connection.recv(4096)
                connection.sendall(answer)

        thread = threading.Thread(target=reply)
        thread.start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{listener.getsockname()[1]}")
        choice = auto.choose(MEMORY)
        thread.join()
    assert choice.name is None and "does not answer" in choice.reason
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("address", ["no address", "http://", "http://a b", "ftp://127.0.0.1"])
def test_an_address_that_is_none_is_taken_as_silence(
    own: dict[str, str],
    best: ShortName,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    address: str,
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", address)
    assert auto.ask(best) == "silence"
    assert "Traceback" not in capsys.readouterr().err


def test_without_a_hub_a_model_that_is_here_is_preferred_to_the_built_in_one(
    own: dict[str, str], tmp_path: Path
) -> None:
    shapes.text_model("llama", tmp_path / "models" / "mine")
    choice = auto.choose(MEMORY)
    assert choice.name == "mine" and "largest model here" in choice.reason
    small = find("qwen3-0.6b")
    assert small is not None
    repo = tmp_path / "hub" / f"models--{small.source.replace('/', '--')}"
    shapes.text_model(small.architecture, repo / "snapshots" / fake_hub.COMMIT)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(fake_hub.COMMIT)
    assert store.is_whole_in_hub(small.source)
    assert auto.choose(MEMORY).name == small.name


def test_what_the_disk_has_no_room_for_is_not_fetched(
    own: dict[str, str], hub: Hub, best: ShortName, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setattr(auto, "_has_disk", lambda model: model != best)
    assert auto.choose(MEMORY).name is None, "the hub has no other"
    assert f"no room for {best.name}" in auto.choose(MEMORY).reason


def test_auto_chooses_by_the_memory_that_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blas, "mlx_backend", lambda: "metal")
    monkeypatch.setattr(auto, "ask", lambda model: "yes")
    monkeypatch.setattr(auto, "_has_disk", lambda model: True)
    monkeypatch.setattr(store, "is_whole_in_hub", lambda name: False)
    assert auto.choose(12 * 10**9).name == "qwen3.5-9b"
    assert auto.choose(100 * 10**9).name == "gpt-oss-120b"
