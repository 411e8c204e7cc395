"""Broken model folders beside sound ones, without a server: listed with the reason, never in the way."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from models import broken_folders
from models.broken_folders import BROKEN
from models.encoder_folders import encoder
from typer.testing import CliRunner

from millrace.cli.app import app
from millrace.models import store
from millrace.models.description import inspect, stamp
from millrace.models.footprint import footprint
from millrace.models.supported import is_supported
from millrace.serving.pictures import takes_in


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    sound = encoder(folder / "models" / "sound")
    broken_folders.make(folder / "models", sound)
    return folder


@pytest.fixture(autouse=True)
def _at_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLRACE_HOME", str(home))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(home / "hub"))


def test_the_list_has_all_of_them_and_the_sound_one_as_before() -> None:
    listed = {model.name: model for model in store.local_models()}
    assert set(listed) >= {*BROKEN, "sound"} - {"modules-list", "modules-nested", "labels-text"}
    assert listed["sound"].error is None and listed["sound"].architecture == "bert"


def test_the_command_shows_what_is_broken() -> None:
    shown = CliRunner().invoke(app, ["list"], env={"COLUMNS": "200"})
    assert shown.exit_code == 0, shown.output
    assert "bits-text is broken: " in shown.output and "should be a whole number" in shown.output
    read = json.loads(CliRunner().invoke(app, ["list", "--json"]).output)
    errors = {model["name"]: model["error"] for model in read}
    assert errors["sound"] is None and "nested too deeply" in errors["config-nested"]


def test_all_that_reads_a_folder_says_what_is_wrong_and_raises_nothing_else(home: Path) -> None:
    from millrace.errors import ModelError

    for name in BROKEN:
        folder = home / "models" / name
        for read in (footprint, is_supported):
            try:
                read(folder)
            except ModelError as error:
                assert str(folder) in error.message
        assert takes_in(folder) == ["text"]


def test_a_folder_is_read_again_when_a_file_of_it_changes(home: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(home / "models" / "sound", tmp_path / "changing"))
    before = stamp(folder)
    assert inspect(folder).error is None
    whole = (folder / "config.json").read_bytes()
    (folder / "config.json").write_bytes(b"{")
    assert stamp(folder) != before and inspect(folder).error is not None
    (folder / "config.json").write_bytes(whole)
    assert inspect(folder).error is None
    shutil.rmtree(folder)
    assert stamp(folder) == () and "is missing" in (inspect(folder).error or "")


def test_a_broken_one_can_be_removed(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(home / "models" / "config-loop", home / "models" / "gone", symlinks=True)
    store.remove("gone")
    assert not (home / "models" / "gone").exists()


def test_a_hub_snapshot_that_is_broken_is_listed_and_one_that_is_partial_is_not(home: Path) -> None:
    for name, broken in (("one", b"["), ("two", None)):
        repo = home / "hub" / f"models--org--{name}"
        (repo / "refs").mkdir(parents=True)
        (repo / "refs" / "main").write_text("c0ffee")
        folder = Path(shutil.copytree(home / "models" / "sound", repo / "snapshots" / "c0ffee"))
        if broken is not None:
            (folder / "config.json").write_bytes(broken)
        else:
            (folder / "model.safetensors").unlink()
    hub = {m.name: m.error for m in store.local_models() if m.source == "hub"}
    assert set(hub) == {"org/one"} and "not valid JSON" in (hub["org/one"] or "")
