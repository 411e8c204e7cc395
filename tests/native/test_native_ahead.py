"""Kernels are compiled while a model is loaded: in processes beside it, and none after it is ready."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from adapters_help import random_pairs, write_mlx
from api import tiny_folder
from conftest import PATIENCE, Server

pytest.importorskip("llvmlite")

from native_models import Kind

from millrace.native import COMPILING, ahead, begin_in_fresh_home, library, native, native_layers
from millrace.native import compile as compiling
from millrace.native.formats import Format

_alive: list[Any] = []
"""Caches of code that was loaded: threads of models that are gone may still be leaving it."""


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home without compiled kernels; nothing is loaded yet."""
    monkeypatch.setenv("MILLRACE_HOME", str(tmp_path))
    for module, name in ((compiling, "folder"), (library, "of_format"), (library, "shared")):
        found = functools.cache(getattr(module, name).__wrapped__)
        monkeypatch.setattr(module, name, found)
        _alive.append(found)
    return tmp_path


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What this process compiles itself."""
    seen: list[str] = []
    real = compiling._compiled

    def noted(kernels: dict[str, compiling.Body]) -> bytes:
        seen.extend(kernels)
        return real(kernels)

    monkeypatch.setattr(compiling, "_compiled", noted)
    return seen


def kept(home: Path) -> set[str]:
    return {path.stem for path in (home / "compiled").rglob("*.o")}


def test_a_loaded_model_has_all_its_kernels_and_its_progress_was_reported(
    fresh: Path, here: list[str]
) -> None:
    reported: list[tuple[str, float]] = []
    model = native(
        Kind(bits=4).build(), 2, note=lambda share, stage="": reported.append((stage, share))
    )
    assert model is not None
    forms = {matrix.form.name for layer in model.layers for matrix in (layer.queries, layer.down)}
    assert kept(fresh) >= forms | {"shared"}
    assert here == [], "other processes compiled them"
    shares = [share for stage, share in reported if stage == COMPILING]
    assert shares and shares == sorted(shares) and 0 <= shares[0] <= shares[-1] < 1
    before = kept(fresh)
    model(mx.array([[1, 2, 3]]), model.make_cache())
    assert kept(fresh) == before and here == []


class _Rarely(nn.Module):  # type: ignore[misc]
    """A model with a layer that a first token does not reach."""

    def __init__(self) -> None:
        super().__init__()
        self.often = nn.QuantizedLinear(64, 64, bias=False, group_size=32, bits=4)
        self.rarely = nn.QuantizedLinear(64, 64, bias=False, group_size=64, bits=8)


def test_layers_that_are_not_run_at_first_have_their_kernels_as_well(
    fresh: Path, here: list[str]
) -> None:
    model = _Rarely()
    assert native_layers(model, 2) is not None
    before = kept(fresh)
    assert len(before) == 3, before
    for layer in (model.often, model.rarely):
        mx.eval(layer(mx.ones((1, 64))))
    assert kept(fresh) == before and here == []


def test_where_no_process_can_be_started_kernels_are_compiled_here(
    fresh: Path, here: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for executable in ("/nowhere/python", sys.executable):
        monkeypatch.setattr(sys, "executable", executable)
        monkeypatch.setattr(ahead, "_MODULE", "millrace.native.nothing")
        kernels = ahead.KernelCompiler(2)
        kernels.want(form := Format("f32" if executable == sys.executable else "bf16"))
        kernels.finish()
        assert form.name in kept(fresh)
    assert "streamed1" in here and "processes failed" in caplog.text


_BUILD = """
import logging, sys
logging.basicConfig(level=logging.INFO)
from millrace.native import library
from millrace.native.formats import Format
print("ready", flush=True)
sys.stdin.readline()
library.build(Format("f32"))
"""


def test_a_set_that_another_process_compiles_is_waited_for(tmp_path: Path) -> None:
    several = [
        subprocess.Popen(
            [sys.executable, "-c", _BUILD],
            env=os.environ | {"MILLRACE_HOME": str(tmp_path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    for process in several:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for process in several:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    logs = [process.communicate(timeout=PATIENCE)[1] for process in several]
    assert [process.returncode for process in several] == [0, 0, 0], logs
    assert "".join(logs).count("compiling kernels") == 1
    files = [path.name for path in (tmp_path / "compiled").rglob("*") if path.is_file()]
    assert files == ["f32_32_none.o"], "and no lock is left"


def test_in_a_fresh_home_kernels_are_begun_before_the_model_is_there(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(subprocess, "Popen", lambda command, **_: started.append(command))
    begin_in_fresh_home()
    assert started == [[sys.executable, "-m", "millrace.native.ahead", "default"]]
    (fresh / "compiled").mkdir()
    begin_in_fresh_home()
    assert len(started) == 1


def test_what_set_up_compiles_is_what_the_default_model_has(
    default_model: Path,
) -> None:
    from mlx_lm.utils import load_model

    from millrace.native.plan import plan

    found: set[Format] = set()
    plan(load_model(default_model, lazy=True)[0], found=found.add)
    assert found | {None} == set(ahead.DEFAULT) <= set(ahead.USUAL)


GRAMMAR = {
    "type": "json_schema",
    "json_schema": {
        "name": "x",
        "schema": {
            "type": "object",
            "properties": {"a": {"type": "boolean"}},
            "required": ["a"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, default_model: Path) -> Path:
    """A tiny model that our own kernels run, of two formats."""
    from mlx_lm.models import llama

    shape = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
    }
    config: dict[str, Any] = tiny_folder._CONFIG | shape
    mx.random.seed(0)
    made = llama.Model(llama.ModelArgs.from_dict(config))
    nn.quantize(
        made,
        class_predicate=lambda path, layer: (
            hasattr(layer, "to_quantized")
            and {"group_size": 32, "bits": 8 if "embed" in path else 4}
        ),
    )
    config["quantization"] = {
        "group_size": 32,
        "bits": 4,
        "model.embed_tokens": {"group_size": 32, "bits": 8},
    }
    folder = tmp_path_factory.mktemp("ahead") / "tiny"
    return tiny_folder.write(folder, default_model, made, config)


def test_after_ready_in_a_fresh_home_no_request_causes_a_compilation(
    start: Callable[..., Server], model: Path, tmp_path: Path
) -> None:
    server = start(str(model), "--name", "tiny", env={"MILLRACE_HOME": str(tmp_path)}).wait_ready()
    ready = server.log()
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "compiled").rglob("*.o")}
    assert len(before) == 3, "two formats, and what they share"
    assert "compiled 3 sets of kernels" in ready

    def chat(content: str = "Hello", **more: Any) -> dict[str, Any]:
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 6} | more
        answer = server.post("/v1/chat/completions", body)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    chat()
    with ThreadPoolExecutor(4) as four:
        list(four.map(lambda n: chat("Hi " * n, max_tokens=20, ignore_eos=True), range(3, 7)))
    chat("word " * 1500)
    content = chat(response_format=GRAMMAR, max_tokens=40)["choices"][0]["message"]["content"]
    assert isinstance(json.loads(content)["a"], bool)
    chat(logprobs=True, top_logprobs=3)
    chat(temperature=0.9, top_p=0.9, top_k=20, min_p=0.05, frequency_penalty=0.5, n=2)
    chat("a b c a b c a b c a b c", max_tokens=40)
    shapes = {f"model.layers.{n}.self_attn.q_proj": (64, 64) for n in range(2)}
    adapter = write_mlx(tmp_path / "adapter", random_pairs(shapes))
    loaded = server.post("/v1/load_lora_adapter", {"lora_name": "other", "lora_path": str(adapter)})
    assert loaded.status_code == 200, loaded.text
    chat(model="other")

    after = {path: path.stat().st_mtime_ns for path in (tmp_path / "compiled").rglob("*.o")}
    assert after == before
    assert "compiling kernels" not in server.log()[len(ready) :]
