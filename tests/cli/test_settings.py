"""The configuration file and the environment: read, checked, and in the right order."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from api import tiny_folder
from conftest import Server
from typer.testing import CliRunner

from millrace.cli.app import app
from millrace.cli.models_served import specs_of
from millrace.cli.panels import OTHERS, PANELS
from millrace.cli.settings import read
from millrace.config import EngineConfig, ServeConfig
from millrace.durations import seconds_of
from millrace.errors import SetupError
from millrace.serving.catalogue import ModelSpec

OPTIONS = ("port", "host", "max_queue", "cors_origin", "memory", "config_", "model")


def _file(folder: Path, text: str) -> Path:
    file = folder / "millrace.toml"
    file.write_text(text)
    return file


def test_options_and_models_are_read(tmp_path: Path) -> None:
    text = 'port = 9000\nmax-queue = 3\n[models.coder]\nmodel = "x"\ntemperature = 0.5\nttl = "5m"'
    options, models, keys = read(_file(tmp_path, text), OPTIONS)
    assert keys == []
    assert options == {"port": 9000, "max_queue": 3}
    assert models["coder"].defaults == {"temperature": 0.5} and models["coder"].ttl == "5m"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("prot = 1", "Did you mean 'port'"),
        ("zzzz = 1", "There are: "),
        ("model = 'x'", "there is no setting 'model'"),
        ("port = ", "not valid TOML"),
        ("models = 3", "written as tables"),
        ("[models]\nx = 3", "written as tables"),
        ("[port]\nx = 3", "takes no table"),
        ("[models.x]\ntemperature = 1", "`model`"),
        ("[models.x]\nmodel = 'y'\ntemprature = 1", "Did you mean 'temperature'"),
        ("[models.x]\nmodel = 'y'\ntemperature = 'hot'", r"\[models.x\].*temperature"),
        ("[models.x]\nmodel = 'y'\nweights = 'f64'", "weights"),
        ("[models.x]\nmodel = 'y'\npin = 1", "pin"),
        ("max-queue = 1\nmax_queue = 2", "there twice"),
        ("[models.x]\nmodel = 'y'\ntop-k = 1\ntop_k = 2", "there twice"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(SetupError, match=said):
        read(_file(tmp_path, text), OPTIONS)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("port = true", "'port' is a text or a number, not true"),
        ("alias = [['a']]", "'alias' is a text or a number"),
        ("memory = ['1G']", "'memory' is a text or a number"),
        ("only = 1", "'only' is true or false, not 1"),
        ("only = 'yes'", "'only' is true or false, not yes"),
        ("alias = ['a', true]", "'alias' is a text or a number"),
    ],
)
def test_options_have_their_own_kinds_of_values(tmp_path: Path, text: str, said: str) -> None:
    ended = CliRunner().invoke(app, ["serve", "--config", str(_file(tmp_path, text))])
    assert isinstance(ended.exception, SetupError) and said in str(ended.exception)


def _specs(tmp_path: Path, text: str) -> list[ModelSpec]:
    tables = read(_file(tmp_path, text), OPTIONS)[1]
    base = ModelSpec(engine=EngineConfig(model="", name=""), named=True)
    return specs_of([], tables, base, lambda *_: None, name=None, aliases=(), pins=()).specs


@pytest.mark.parametrize(
    ("name", "said_of_it", "said"),
    [
        ("x", "aliases = ['']", "'' is no name"),
        ("x", 'aliases = ["a\\u0000b"]', "is no name"),
        ("''", "", "'' is no name"),
        ("x", "tool_format = 'nope'", "'x': There is no tool format 'nope'"),
        ("x", "reasoning_format = 'nope'", "'x': There is no reasoning format 'nope'"),
        ("x", "pooling = 'nope'", "'x': There is no pooling 'nope'"),
        ("x", "specprefill = true", "needs a draft"),
        ("x", "specprefill_draft = ''", "specprefill-draft is empty"),
        ("x", "specprefill_draft = 'y'\nspecprefill_keep_pct = 1.5", "above 0 and at most 1"),
        ("x", "specprefill_draft = 'y'\nspecprefill_threshold = -1", "cannot be -1"),
        ("x", "template_arguments = { messages = 3 }", "'x': The template argument 'messages'"),
    ],
)
def test_what_would_fail_with_the_first_request_is_said_at_the_start(
    tmp_path: Path, default_model: Path, name: str, said_of_it: str, said: str
) -> None:
    with pytest.raises(SetupError, match=said):
        _specs(tmp_path, f"[models.{name}]\nmodel = '{default_model}'\n{said_of_it}")
    with pytest.raises(SetupError, match="model is empty"):
        _specs(tmp_path, "[models.x]\nmodel = ''")


def test_an_alias_is_one_name_however_often_it_is_given(
    tmp_path: Path, default_model: Path
) -> None:
    text = f"\ufeff[models.x]\nmodel = '{default_model}'\naliases = ['a', 'x', 'a']\n"
    text += "lora = { 'b=c' = '/d' }"
    (spec,) = _specs(tmp_path, text)
    assert spec.aliases == ("a",)
    assert [(a.name, a.path) for a in spec.engine.adapters] == [("b=c", "/d")]


def test_a_draft_is_found_and_only_for_its_own_model(tmp_path: Path, default_model: Path) -> None:
    text = f"[models.x]\nmodel = '{default_model}'\nspecprefill-draft = '{default_model}'\n"
    text += f"specprefill-keep-pct = 0.2\nspecprefill = true\n[models.y]\nmodel = '{default_model}'"
    with_it, without = _specs(tmp_path, text)
    sparse = with_it.engine.specprefill
    assert sparse is not None and without.engine.specprefill is None
    assert (sparse.draft, sparse.on, sparse.keep) == (str(default_model), True, 0.2)
    assert sparse.threshold == 8192
    engine = EngineConfig(model="", name="", specprefill=sparse)
    base = ModelSpec(engine=engine, named=True)
    with pytest.raises(SetupError, match="for a single model"):
        specs_of(["a", "b"], {}, base, lambda *_: None, name=None, aliases=(), pins=())


def test_lengths_of_time_are_numbers() -> None:
    engine = EngineConfig(model="", name="")
    for field in ("keep_alive", "drain_timeout", "reader_timeout"):
        with pytest.raises(SetupError, match=field.replace("_", "-")):
            ServeConfig(engine=engine, **{field: float("nan")})


def test_a_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="cannot be read: No such file or directory.$"):
        read(tmp_path / "none.toml", OPTIONS)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (300, 300), ("300", 300), ("5m", 300), ("1h30m", 5400), ("1.5h", 5400), ("250ms", 0.25),
        ("0", 0), ("0s", 0), (0, 0), (-1, -1), ("-1", -1), ("-5m", -1), (1e300, -1), ("1" * 20, -1),
        (float("inf"), -1), (".5s", 0.5), ("+2s", 2),
    ],
)  # fmt: skip
def test_lengths_of_time(text: str | float, seconds: float) -> None:
    assert seconds_of(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "text", ["", "m", "5 minutes", "5m!", "1e3", "nan", "٣s", "5" * 200, "1h-5m"]
)
def test_what_is_no_length_of_time_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="length of time"):
        seconds_of(text)


def _refused(tmp_path: Path, *arguments: str) -> str:
    file = str(tmp_path / "millrace.toml")
    command = [sys.executable, "-m", "millrace", "serve", "--config", file, *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode != 0
    return " ".join(ended.stderr.split())


def test_the_command_says_what_is_wrong(tmp_path: Path) -> None:
    _file(tmp_path, "prot = 1")
    assert "Did you mean 'port'" in _refused(tmp_path)
    _file(tmp_path, '[models.x]\nmodel = "smollm2"\ntemperature = -1')
    assert "[models.x] temperature -1" in _refused(tmp_path)
    _file(tmp_path, '[models.x]\nmodel = "smollm2"\n[models.y]\nmodel = "smollm2"\naliases = ["x"]')
    assert "called 'x'" in _refused(tmp_path)
    _file(tmp_path, "")
    assert "--pin other" in _refused(tmp_path, "--pin", "other")
    assert "--ttl" in _refused(tmp_path, "--ttl", "soon")
    assert "--name and --alias" in _refused(tmp_path, "smollm2", "x=smollm2", "--name", "y")
    assert "needs at least" in _refused(tmp_path, "--memory", "200M")


TOML = """
port = 1
max_running = 7
[models.first]
model = "{folder}/first"
aliases = ["one", "eins"]
temperature = 0.25
top_k = 5
max_tokens = 3
template_arguments = {{ mood = "merry" }}
[models.second]
model = "{folder}/first"
ttl = 0
"""
TEMPLATE = "{% for m in messages %}{{ m.content }} {% endfor %}{{ mood }}"


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory, default_model: Path) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("profiled")
    made = tiny_folder.make(folder / "first", default_model)
    (made / "chat_template.jinja").write_text(TEMPLATE)
    (made / "generation_config.json").write_text('{"temperature": 0.9, "top_p": 0.8}')
    file = _file(folder, TOML.format(folder=folder))
    env = {"MILLRACE_MAX_QUEUE": "11", "MILLRACE_MAX_RUNNING": "9", "MILLRACE_MEMORY": "2G"}
    server = Server("first", "--config", str(file), env=os.environ | env).wait_ready()
    yield server
    server.stop()


def test_the_command_line_comes_before_the_environment_and_that_before_the_file(
    profiled: Server,
) -> None:
    told = profiled.http.get("/server_info", params={"model": "first"}).json()
    assert (told["max_running_requests"], told["max_queued_requests"]) == (9, 11)


def test_a_profile_is_told(profiled: Server) -> None:
    cards = {c["id"]: c for c in profiled.http.get("/v1/models").json()["data"]}
    assert set(cards) == {"first", "one", "eins", "second"}
    profile = cards["first"]["profile"]
    assert profile["temperature"] == 0.25 and profile["template_arguments"] == {"mood": "merry"}
    assert cards["one"]["alias_of"] == "first" and cards["second"]["state"] == "unloaded"
    shown = profiled.post("/api/show", {"model": "one"}).json()["parameters"]
    assert "temperature 0.25" in shown and "top_p 0.8" in shown and "top_k 5" in shown


SAYS = [{"role": "user", "content": "x"}]
ANSWERS = [
    ("/v1/chat/completions", {"messages": SAYS}, ("usage", "completion_tokens")),
    ("/v1/completions", {"prompt": "x"}, ("usage", "completion_tokens")),
    ("/v1/responses", {"input": "x"}, ("usage", "output_tokens")),
    ("/api/chat", {"messages": SAYS, "stream": False}, ("eval_count",)),
    ("/api/generate", {"prompt": "x", "stream": False}, ("eval_count",)),
]


@pytest.mark.parametrize(("path", "body", "where"), ANSWERS)
def test_a_profile_holds_on_every_protocol_below_the_request(
    profiled: Server, path: str, body: dict[str, object], where: tuple[str, ...]
) -> None:
    answer = profiled.post(path, {"model": "one", **body})
    assert answer.status_code == 200, answer.text
    value = answer.json()
    for key in where:
        value = value[key]
    assert value == 3


def test_template_arguments_of_a_profile_give_way_to_the_requests(profiled: Server) -> None:
    def rendered(**more: object) -> str:
        body = {"model": "first", "messages": SAYS, **more}
        tokens = profiled.post("/tokenize", body).json()["tokens"]
        return str(
            profiled.post("/detokenize", {"model": "first", "tokens": tokens}).json()["text"]
        )

    assert rendered() == "x merry"
    assert rendered(chat_template_kwargs={"mood": "sad"}) == "x sad"


def test_ps_and_stop(profiled: Server) -> None:
    def run(*arguments: str) -> str:
        command = [sys.executable, "-m", "millrace", *arguments, "--url", profiled.url]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
        return ended.stdout + ended.stderr

    listed = run("ps")
    assert "first" in listed and "for ever" in listed and "2.1 GB" in listed
    assert "is not loaded any more" in run("stop", "one")
    assert "No model is loaded" in run("ps")
    assert "There is no model 'nope'" in run("stop", "nope")
    assert profiled.http.get("/health").status_code == 200


def test_show_tells_what_the_configuration_sets(tmp_path: Path, default_model: Path) -> None:
    text = f'port = 9\n[models.mine]\nmodel = "{default_model}"\naliases = ["m"]\ntop_k = 4'
    env = os.environ | {"MILLRACE_CONFIG": str(_file(tmp_path, text))}
    command = [sys.executable, "-m", "millrace", "show", "m"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)
    assert "top_k = 4" in shown.stdout, shown.stderr


def test_every_option_of_serve_is_shown_in_a_group_and_says_where_else_it_can_stand() -> None:
    told = CliRunner().invoke(app, ["serve", "-h"], env={"COLUMNS": "120", "TERM": "dumb"}).output
    for title in PANELS:
        assert title in told
    assert f"─ {OTHERS} ─" not in told
    assert "MILLRACE_PORT is --port" in told and "[env var" not in told
    names = [name for names in PANELS.values() for name in names.split()]
    assert len(names) == len(set(names))
