"""What a model will take, told from its files."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import msgspec
import pytest

from millrace.config import EngineConfig, SpecPrefillConfig, Weights
from millrace.errors import ModelError, SetupError
from millrace.models import blas
from millrace.models.footprint import MIB, device_budget, footprint
from millrace.serving.catalogue import ModelSpec
from millrace.serving.metrics import Metrics
from millrace.serving.model_launcher import ModelLauncher, Workplace

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "max_position_embeddings": 100_000,
}


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blas, "mlx_backend", lambda: "cpu")


def _folder(folder: Path, tensors: dict[str, tuple[str, list[int]]], **config: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    head: dict[str, Any] = {}
    end = 0
    for name, (kind, shape) in tensors.items():
        size = math.prod(shape) * (2 if kind == "BF16" else 4)
        head[name] = {"dtype": kind, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    data = json.dumps(head).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(data)) + data)
        file.truncate(8 + len(data) + end)  # nothing of it is written to the disk
    return folder


def test_weights_count_as_placement_holds_them(tmp_path: Path) -> None:
    folder = _folder(tmp_path, {"a": ("BF16", [10, 100]), "b": ("F32", [7])})
    assert footprint(folder).weights == 2028
    assert footprint(folder, "keep").weights == 2028
    assert footprint(folder, "f32").weights == 4028
    assert footprint(folder, "bf16").weights == 2014
    _folder(tmp_path, {"a": ("BF16", [10, 100])}, model_type="mamba")
    assert footprint(folder).weights == 4000, "what our kernels do not know is widened"


def test_packed_weights_are_widened_to_what_they_stand_for(tmp_path: Path) -> None:
    tensors = {
        "x.weight": ("U32", [16, 8]),
        "x.scales": ("BF16", [16, 1]),
        "x.biases": ("BF16", [16, 1]),
    }
    folder = _folder(tmp_path, tensors, quantization={"bits": 4, "group_size": 64})
    assert footprint(folder).weights == 16 * 8 * 4 + 2 * 32
    assert footprint(folder, "f32").weights == 16 * 64 * 4


@pytest.mark.parametrize(("rows", "held"), [(16, "bf16"), (1 << 24, "keep")])
def test_small_packed_weights_are_widened_on_cuda(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int, held: Weights
) -> None:
    tensors = {
        "x.weight": ("U32", [rows, 8]),
        "x.scales": ("BF16", [rows, 1]),
        "x.biases": ("BF16", [rows, 1]),
    }
    folder = _folder(tmp_path, tensors, quantization={"bits": 4, "group_size": 64})
    monkeypatch.setattr(blas, "mlx_backend", lambda: "cuda")
    assert footprint(folder).weights == footprint(folder, held).weights
    assert footprint(folder, "keep").weights != footprint(folder, "bf16").weights


def test_the_least_state_is_a_window_within_bounds(tmp_path: Path) -> None:
    tensors = {"a": ("F32", [1])}
    per_token = 2 * 3 * 2 * 16 * 4
    assert footprint(_folder(tmp_path, tensors)).least_kv == 100_000 * per_token
    assert footprint(_folder(tmp_path, tensors, num_hidden_layers=900)).least_kv == 256 * MIB
    short = _folder(tmp_path, tensors, max_position_embeddings=8)
    assert footprint(short).least_kv == 4 * MIB
    for strange in ({"num_attention_heads": 0}, {"hidden_size": None}, {"head_dim": []}):
        odd = {"head_dim": None} | strange
        assert 4 * MIB <= footprint(_folder(tmp_path, tensors, **odd)).least_kv <= 256 * MIB
    with pytest.raises(ModelError, match="hidden_size should be a number, and is a text"):
        footprint(_folder(tmp_path, tensors, hidden_size="x"))


def test_broken_weights_are_told(tmp_path: Path) -> None:
    folder = _folder(tmp_path, {})
    for data in (b"", b"\xff" * 8, struct.pack("<Q", 4) + b"nope"):
        (folder / "model.safetensors").write_bytes(data)
        with pytest.raises(ModelError, match="sound"):
            footprint(folder)


def test_an_engine_is_told_its_share(tmp_path: Path) -> None:
    launcher = ModelLauncher(Workplace(), Metrics(), idle=1.0, max_queue=1)
    folder = str(_folder(tmp_path, {"a": ("F32", [1])}))

    def told(state: int, **more: Any) -> tuple[int | None, int | None]:
        spec = ModelSpec(engine=EngineConfig(model=folder, name="m", **more))
        least = launcher.need(spec).least
        found = launcher.engine_config(spec, max(state, least))
        assert (found.kv_memory or 0) + (found.cache_memory or 0) <= max(state, least)
        return found.kv_memory, found.cache_memory

    assert told(1000 * MIB) == (700 * MIB, 300 * MIB)
    assert told(1000 * MIB, cache=False) == (1000 * MIB, None)
    assert told(1000 * MIB, kv_memory=100 * MIB) == (100 * MIB, 300 * MIB)
    assert told(1000 * MIB, cache_memory=100 * MIB) == (900 * MIB, 100 * MIB)
    assert told(0, kv_memory=64 * MIB, cache_memory=32 * MIB) == (64 * MIB, 32 * MIB)
    kv, cache = told(0)
    assert kv and cache and kv >= cache


def test_a_draft_is_counted_with_its_model(tmp_path: Path) -> None:
    launcher = ModelLauncher(Workplace(), Metrics(), idle=1.0, max_queue=1)
    for name, size in (("model", 1000), ("draft", 600)):
        (tmp_path / name).mkdir()
        _folder(tmp_path / name, {"a": ("F32", [size, 1024])})
    config = EngineConfig(model=str(tmp_path / "model"), name="m")
    draft = SpecPrefillConfig(draft=str(tmp_path / "draft"))
    alone, both = (
        launcher.need(ModelSpec(engine=msgspec.structs.replace(config, specprefill=sparse)))
        for sparse in (None, draft)
    )
    assert both.fixed - alone.fixed >= 600 * 4096
    for more in ({}, {"kv_memory": 64 * MIB, "cache_memory": 32 * MIB}, {"cache": False}):
        given = msgspec.structs.replace(config, specprefill=draft, **more)
        least = launcher.need(ModelSpec(engine=given)).least
        found = launcher.engine_config(ModelSpec(engine=given), least)
        assert found.draft_memory and found.kv_memory
        assert found.draft_memory + found.kv_memory + (found.cache_memory or 0) <= least
    encoder = msgspec.structs.replace(config, specprefill=draft, task="embed")
    with pytest.raises(SetupError, match="models that make text"):
        launcher.need(ModelSpec(engine=encoder))


def test_the_device_has_a_budget() -> None:
    assert (device_budget() or 0) > 100 * MIB
