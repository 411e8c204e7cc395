"""Ollama's library calls through its own client: list, show, ps, pull, delete, and refusals."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import ollama
import pytest
from api import tiny_folder
from conftest import Server


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("library")


@pytest.fixture(scope="module")
def library(home: Path, default_model: Path) -> Iterator[Server]:
    """A server with a home of its own, in which lie the served model and another."""
    served = tiny_folder.make(home / "models" / "served", default_model)
    shutil.copytree(served, home / "models" / "spare")
    env = {"MILLRACE_HOME": str(home), "HF_HUB_CACHE": str(home / "hub"), "HF_HUB_OFFLINE": "1"}
    running = Server(str(served), env=env, only=False).wait_ready()
    yield running
    running.stop()


@pytest.fixture
def client(library: Server) -> ollama.Client:
    return ollama.Client(library.url)


def test_list_and_ps(client: ollama.Client, library: Server) -> None:
    listed, _ = client.list().models
    assert listed.model == "served:latest"
    assert listed.modified_at and listed.size and len(listed.digest or "") == 64
    assert listed.details and listed.details.family == "llama"
    assert listed.details.parameter_size == "1.6M"
    (loaded,) = client.ps().models
    assert (loaded.model, loaded.digest) == (listed.model, listed.digest)
    assert loaded.context_length == 8192 and loaded.expires_at and loaded.size
    assert client.generate(listed.model or "", "a", raw=True, options={"num_predict": 1}).done


@pytest.mark.parametrize(
    "name", ["/\0", "a/\0b", "~nobody-is-called-so", "~\0", "a/" + 5000 * "b", "\x9b/\0*"]
)
def test_names_that_no_file_can_have(library: Server, name: str) -> None:
    calls = [("POST", "/api/show"), ("DELETE", "/api/delete"), ("POST", "/api/pull")]
    for method, path in calls:
        answer = library.http.request(method, path, json={"model": name, "stream": False})
        assert answer.status_code in (400, 404), (path, answer.text)
        assert answer.json()["error"]
    for path in ("/v1/completions", "/v1/embeddings", "/models/load", "/models/unload"):
        answer = library.post(path, {"model": name, "prompt": "a", "input": "a"})
        assert answer.status_code in (400, 404), (path, answer.text)
    for end in ("load", "unload"):
        answer = library.post(f"/v1/models/{quote(name, safe='')}/{end}", {})
        assert answer.status_code in (400, 404), (end, answer.text)


def test_show(client: ollama.Client) -> None:
    for name in ("served", "served:latest", "spare"):
        shown = client.show(name)
        assert shown.modelinfo and shown.modelinfo["general.architecture"] == "llama"
        assert shown.modelinfo["llama.context_length"] == 8192
        assert shown.capabilities == ["completion", "tools"]
    for name in ("nope", "../models/served", "/etc"):
        with pytest.raises(ollama.ResponseError) as caught:
            client.show(name)
        assert caught.value.status_code == 404


def test_show_of_a_chat_model(server: Server) -> None:
    shown = ollama.Client(server.url).show("smollm2")
    assert shown.capabilities == ["completion", "tools"]
    assert "im_start" in (shown.template or "")
    assert "temperature 0.2" in (shown.parameters or "")


def test_version_and_heads(library: Server) -> None:
    assert library.http.get("/api/version").json()["version"].count(".") == 2
    for path in ("/api/version", "/api/tags", "/api/ps"):
        assert library.http.head(path).status_code == 200


def test_pull_of_what_is_here(client: ollama.Client) -> None:
    for name in ("served", "spare", "spare:latest"):
        assert client.pull(name).status == "success"
        steps = [s.status for s in client.pull(name, stream=True)]
        assert steps[0] == "pulling manifest" and steps[-1] == "success"


def test_pull_without_a_network(client: ollama.Client, library: Server) -> None:
    with pytest.raises(ollama.ResponseError, match="org/none"):
        client.pull("org/none")
    with pytest.raises(ollama.ResponseError, match="org/none"):
        list(client.pull("org/none", stream=True))
    with library.http.stream("POST", "/api/pull", json={"name": "llama9"}) as response:
        assert response.status_code == 200
        lines = [json.loads(line) for line in response.iter_lines()]
    assert set(lines[-1]) == {"error"} and "llama9" in lines[-1]["error"]


def test_paths_are_no_names(client: ollama.Client, home: Path) -> None:
    for name in (str(home / "models" / "spare"), "../x", "./y", "a/b/c", "-x"):
        with pytest.raises(ollama.ResponseError) as caught:
            client.pull(name)
        assert caught.value.status_code == 400


def test_delete(client: ollama.Client, home: Path) -> None:
    with pytest.raises(ollama.ResponseError, match="served") as caught:
        client.delete("served")
    assert caught.value.status_code == 400
    shutil.copytree(home / "models" / "spare", home / "models" / "away")
    assert client.delete("away:latest").status == "success"
    assert not (home / "models" / "away").exists()
    with pytest.raises(ollama.ResponseError) as caught:
        client.delete("away")
    assert caught.value.status_code == 404


def _hub_entry(home: Path, name: str, of: Path) -> Path:
    repo = home / "hub" / f"models--{name.replace('/', '--')}"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("c0ffee")
    shutil.copytree(of, repo / "snapshots" / "c0ffee")
    return repo


def test_delete_takes_nothing_from_the_cache_that_others_share(
    client: ollama.Client, library: Server, home: Path
) -> None:
    repo = _hub_entry(home, "org/shared", home / "models" / "spare")
    assert client.show("org/shared").modelinfo
    with pytest.raises(ollama.ResponseError, match="millrace rm org/shared") as caught:
        client.delete("org/shared")
    assert caught.value.status_code == 403
    assert (repo / "snapshots" / "c0ffee" / "config.json").is_file()
    removable = {
        m["name"]: m["removable"] for m in library.http.get("/v1/library").json()["models"]
    }
    assert removable["spare"] and not removable["org/shared"] and not removable["served"]


@pytest.mark.parametrize("name", ["../outside", "..", ".", "models/../outside", "%2e%2e/outside"])
def test_delete_stays_in_the_store(client: ollama.Client, home: Path, name: str) -> None:
    outside = home / "outside"
    if not outside.exists():
        shutil.copytree(home / "models" / "spare", outside)
    with pytest.raises(ollama.ResponseError) as caught:
        client.delete(name)
    assert caught.value.status_code == 404
    assert (outside / "config.json").is_file() and (home / "models" / "spare").is_dir()


def test_delete_of_a_link_leaves_what_it_leads_to(client: ollama.Client, home: Path) -> None:
    target = home / "elsewhere"
    shutil.copytree(home / "models" / "spare", target)
    link = home / "models" / "linked"
    link.symlink_to(target)
    assert client.delete("linked").status == "success"
    assert not link.is_symlink() and (target / "config.json").is_file()
    assert not list((home / "models").glob(".removed-*"))
    inner = home / "models" / "inner"
    shutil.copytree(home / "models" / "spare", inner)
    (inner / "more").symlink_to(target)
    assert client.delete("inner").status == "success"
    assert (target / "config.json").is_file()


def test_a_link_to_a_served_model_is_not_removed(client: ollama.Client, home: Path) -> None:
    link = home / "models" / "other-name"
    link.symlink_to(home / "models" / "served")
    with pytest.raises(ollama.ResponseError, match="being served") as caught:
        client.delete("other-name")
    assert caught.value.status_code == 400 and link.is_symlink()
    link.unlink()


def test_a_model_that_is_not_whole_can_be_removed(client: ollama.Client, home: Path) -> None:
    broken = home / "models" / "broken"
    broken.mkdir()
    (broken / "config.json").write_text("{}")
    assert client.delete("broken").status == "success"
    assert not broken.exists()


def test_what_is_refused_by_name(client: ollama.Client, library: Server) -> None:
    with pytest.raises(ollama.ResponseError, match="embeddings"):
        client.embed("served", "hi")
    with pytest.raises(ollama.ResponseError, match="embeddings"):
        client.embeddings("served", "hi")
    with pytest.raises(ollama.ResponseError) as caught:
        client.embed("nope", "hi")
    assert caught.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="/api/create"):
        client.create("mine", from_="served")
    with pytest.raises(ollama.ResponseError, match="/api/push"):
        client.push("served")
    assert (
        "/api/copy"
        in library.post("/api/copy", {"source": "a", "destination": "b"}).json()["error"]
    )
    assert library.post("/api/show", {}).status_code == 400
