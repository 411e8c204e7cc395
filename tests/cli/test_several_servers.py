"""Two servers on one machine: what each shows of its memory, and how commands find them."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from api import scrape, tiny_folder
from cli.terminals import Typist
from conftest import ROOT, Server, free_port, until
from typer.testing import CliRunner

from millrace import servers
from millrace.cli.app import app
from millrace.errors import MillraceError, SetupError
from millrace.prove.processes import furnish
from millrace.sizes import format_bytes

ASK = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0, "ignore_eos": True}


@dataclasses.dataclass
class Two:
    home: Path
    model: Path
    first: Server
    second: Server
    banner: str

    @property
    def env(self) -> dict[str, str]:
        return {"MILLRACE_HOME": str(self.home)}


class _Shown(Server):
    """A server whose banner is kept."""

    def __init__(self, *args: str, env: dict[str, str]) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.http = httpx.Client(base_url=self.url, timeout=120)
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        command = [sys.executable, "-m", "millrace", "serve", *args, "--port", str(self.port)]
        self.process = subprocess.Popen(
            command, env=os.environ | env, stdout=self._log, stderr=subprocess.STDOUT
        )

    def wait_banner(self) -> str:
        assert until(lambda: "Try next" in self.log() or self.process.poll() is not None)
        return self.log()


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, default_model: Path) -> Iterator[Two]:
    room = tmp_path_factory.mktemp("two")
    furnish(room)
    home = room / "home"
    model = tiny_folder.make(room / "tiny", default_model)
    env = {"MILLRACE_HOME": str(home)}
    common = (str(model), "--only", "--cache-disk", "64M", "--store", "none")
    first = Server(*common, "--server-name", "one", env=env).wait_ready()
    second = _Shown(*common, env=env)
    try:
        yield Two(home, model, first, second, second.wait_banner())
    finally:
        first.stop()
        second.stop()


@pytest.fixture
def run(two: Two, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    monkeypatch.setenv("MILLRACE_HOME", str(two.home))
    monkeypatch.delenv("MILLRACE_URL", raising=False)

    def run(*words: str) -> str:
        found = CliRunner().invoke(app, words, catch_exceptions=False)
        assert found.exit_code == 0, found.output
        return found.output

    return run


def status(server: Server) -> dict[str, Any]:
    return dict(server.http.get("/v1/status").json())


def test_the_three_numbers_are_the_same_everywhere(two: Two) -> None:
    assert two.first.post("/v1/completions", ASK).status_code == 200
    (model,) = status(two.first)["models"]
    memory = model["memory"]
    assert memory["weights"] == model["weight_bytes"] > 0
    assert memory["kv_in_use"] == model["kv_bytes"] + model["cache_bytes"] > 0
    assert memory["ceiling"] == model["reserved_bytes"] > 100 * memory["weights"]
    total = status(two.first)["memory"]
    assert (total["weights"], total["kv_in_use"]) == (memory["weights"], memory["kv_in_use"])
    assert total["reserved"] == memory["ceiling"] <= total["limit"]
    assert memory["weights"] < total["held"] < memory["ceiling"]
    (card,) = two.first.http.get("/v1/models").json()["data"]
    assert card["memory"] == memory and "memory_bytes" not in card
    (shown,) = two.first.http.get("/api/ps").json()["models"]
    assert shown["memory"] == memory and shown["size_vram"] in (0, shown["size"])
    assert shown["size"] == memory["weights"] + memory["kv_in_use"]
    text = two.first.http.get("/metrics").text
    for name, value in (("weight_bytes", "weights"), ("ceiling_bytes", "ceiling")):
        found = re.search(rf'^millrace_{name}{{model="tiny"}} (\S+)$', text, re.MULTILINE)
        assert found is not None and float(found[1]) == memory[value]
    assert scrape.total(two.first, "millrace_memory_reserved_bytes") == memory["ceiling"]


def test_the_banner_has_them_too(two: Two) -> None:
    (model,) = status(two.second)["models"]
    weights, most = (format_bytes(model["memory"][n]) for n in ("weights", "ceiling"))
    assert f"weights {weights}, key-value memory 0 B in use, at most {most} in all" in two.banner


def test_the_second_counts_what_the_first_holds_and_not_its_ceiling(two: Two) -> None:
    first, second = status(two.first)["memory"], status(two.second)["memory"]
    assert first["other_servers"] == 0
    assert second["limit"] + second["other_servers"] == first["limit"]
    assert first["weights"] < second["other_servers"] < first["reserved"] // 2
    held = format_bytes(second["other_servers"])
    said = rf"hold now: one \(port {two.first.port}\) \S+ MB \(at most \S+ GB\)"
    assert re.search(said, two.banner) and format_bytes(second["limit"]) in two.banner, held
    assert "Together the servers may come to take" in two.banner


def test_the_second_says_what_its_cache_does_without(two: Two) -> None:
    said = f"belongs to the server at port {two.first.port}; this one keeps prefixes in memory only"
    assert said in two.banner
    (model,) = status(two.second)["models"]
    assert said in model["cache_note"] and "--cache-dir" in model["cache_note"]
    (cache,) = two.second.http.get("/v1/cache").json()["models"]
    assert said in cache["disk"]["error"]
    assert status(two.first)["models"][0]["cache_note"] is None


def test_ps_lists_all_servers_and_their_three_numbers(two: Two, run: Callable[..., str]) -> None:
    shown = run("ps")
    assert f"one: {two.first.url}" in shown and two.second.url in shown
    assert shown.count("WEIGHTS") == 2 and "KV IN USE" in shown and "AT MOST" in shown
    memory = status(two.second)["models"][0]["memory"]
    row = shown[shown.index(two.second.url) :]
    for value in memory.values():
        assert format_bytes(value) in row
    assert "this one keeps prefixes in memory only" in row
    assert shown.count("NAME") == 2
    for words in (["--port", str(two.first.port)], ["--server", "one"]):
        assert run("ps", *words).count("WEIGHTS") == 1
    assert '"version"' in run("ps", "--json", "--server", str(two.second.port))


@pytest.mark.parametrize(
    "words", [("ps", "--json"), ("chat",), ("stop", "tiny"), ("stop",)], ids=" ".join
)
def test_without_a_terminal_several_servers_are_listed(two: Two, words: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "millrace", *words]
    env = {k: v for k, v in os.environ.items() if k != "MILLRACE_URL"} | two.env
    done = subprocess.run(
        command, env=env, cwd=ROOT, input="Hello\n", capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1 and not done.stdout
    assert two.first.url in done.stderr and two.second.url in done.stderr
    assert "--port" in done.stderr


def test_names_that_do_not_lead_to_one_server(
    two: Two, run: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for words, text in (
        (("ps", "--server", "nope"), f"called 'nope'. Running:\n  one: {two.first.url}"),
        (("ps", "--server", "one", "--port", "1"), "use one of them"),
        (("ps", "--url", two.first.url, "--port", "1"), "already names the server"),
        (("ps", "--port", "9"), "No server answers at http://127.0.0.1:9"),
        (("stop", "--port", "9"), "No server here is called '9'"),
    ):
        with pytest.raises(MillraceError, match=re.escape(text)):
            CliRunner().invoke(app, words, catch_exceptions=False)
    monkeypatch.setenv("MILLRACE_URL", "http://127.0.0.1:9")
    assert run("ps", "--server", "one").count("WEIGHTS") == 1, "an option comes before MILLRACE_URL"


def test_chat_takes_a_port_or_a_name_and_asks_a_person(two: Two) -> None:
    for words in (["--server", "one"], ["--port", str(two.first.port)]):
        done = subprocess.run(
            [sys.executable, "-m", "millrace", "chat", *words, "--max-tokens", "4"],
            env=os.environ | two.env,
            input="Hello\n",
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
    typist = Typist(["chat"], two.env)
    at = typist.wait_for(f"2  {two.second.url}")
    at = typist.wait_for("Which one", at)
    typist.type("7\r")
    at = typist.wait_for("from 1 to 2", at)
    at = typist.wait_for("Which one", at)
    typist.type("2\r")
    at = typist.wait_for(f"tiny at {two.second.url}", at)
    typist.wait_for("› ", at)
    typist.type("\x04")
    assert typist.end() == 0, typist.shown


def test_a_name_and_a_port_belong_to_one_server(two: Two) -> None:
    for words, text in (
        (["--server-name", "one", "--port", "0"], f"taken: that is the server at {two.first.url}"),
        (
            ["--port", str(two.first.port)],
            f"a millrace server (one, process {two.first.process.pid})",
        ),
        (["--server-name", "8000", "--port", "0"], "begin with a letter"),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "millrace", "serve", str(two.model), "--only", *words],
            env=os.environ | two.env | {"COLUMNS": "400"},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 1 and text in done.stderr


def test_stop_ends_a_server_and_a_killed_one_is_swept(two: Two, run: Callable[..., str]) -> None:
    third = Server(str(two.model), "--server-name", "three", env=two.env).wait_ready()
    fourth = Server(str(two.model), "--server-name", "four", env=two.env).wait_ready()
    ports = {two.first.port, two.second.port, third.port, fourth.port}
    assert {r.port for r in servers.running()} == ports
    assert "tiny is not loaded any more" in run("stop", "tiny", "--server", "three")
    assert status(third)["models"] == [] and status(two.first)["models"]
    assert f"{third.url} has ended" in run("stop", "--server", "three")
    assert third.process.wait(60) == 0
    engine = fourth.engine
    fourth.process.send_signal(signal.SIGKILL)
    fourth.process.wait()
    assert "four" not in run("ps")
    assert {r.port for r in servers.running()} == {two.first.port, two.second.port}
    assert len(list((two.home / "servers").iterdir())) == 2
    assert until(lambda: not Path(f"/proc/{engine}").exists())


def test_one_server_is_taken_without_asking(
    two: Two, run: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = servers.running()
    private = msgspec.structs.replace(own[1], private="chat")
    for found in ([own[0]], [own[0], private]):
        monkeypatch.setattr(servers, "running", lambda found=found: found)
        assert '"version"' in run("ps", "--json")
    assert "started by millrace chat" in run("ps")
    monkeypatch.setattr(servers, "running", lambda: own)
    with pytest.raises(SetupError, match="2 servers run"):
        CliRunner().invoke(app, ["ps", "--json"], catch_exceptions=False)
