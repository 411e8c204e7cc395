"""Adapter folders: both forms give the same factors, and what cannot be served is refused by its name."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from adapters_help import random_pairs, write_mlx, write_peft

from millrace.errors import AdapterError
from millrace.models.adapters import peft
from millrace.models.adapters.fitting import fitted
from millrace.models.adapters.folder import read

MOST = 1 << 24
SHAPES = {
    "model.layers.0.self_attn.q_proj": (32, 48),
    "model.layers.1.self_attn.q_proj": (32, 48),
    "model.layers.1.mlp.down_proj": (64, 32),
}


def test_both_forms_give_the_same_factors_with_the_scale_in_the_second(tmp_path: Path) -> None:
    pairs = random_pairs(SHAPES, rank=8)
    mlx = read(write_mlx(tmp_path / "mlx", pairs, scale=2.5), MOST)
    peft = read(write_peft(tmp_path / "peft", pairs, alpha=20), MOST)
    assert mlx.digest != peft.digest and mlx.rank == peft.rank == 8
    for name, (a, b) in pairs.items():
        for found in (mlx.modules[name], peft.modules[name]):
            assert np.array_equal(found.a, a)
            assert np.allclose(found.b, 2.5 * b)


def test_patterns_and_rslora_change_the_scale_of_a_module(tmp_path: Path) -> None:
    pairs = random_pairs(SHAPES, rank=8)
    pairs["model.layers.1.mlp.down_proj"] = random_pairs({"x": (64, 32)}, rank=4)["x"]
    folder = write_peft(
        tmp_path / "a",
        pairs,
        alpha=16,
        use_rslora=True,
        rank_pattern={"down_proj": 4},
        alpha_pattern={r"layers\.1\.self_attn\.q_proj": 2, "unrelated": 9},
    )
    found = read(folder, MOST)
    scales = {name: (found.modules[name].b / pairs[name][1]).mean() for name in pairs}
    assert scales["model.layers.0.self_attn.q_proj"] == pytest.approx(16 / 8**0.5)
    assert scales["model.layers.1.self_attn.q_proj"] == pytest.approx(2 / 8**0.5)
    assert scales["model.layers.1.mlp.down_proj"] == pytest.approx(16 / 4**0.5)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_weights_of_sixteen_bits_are_widened_as_they_are(dtype: mx.Dtype, tmp_path: Path) -> None:
    folder = write_mlx(tmp_path / "a", random_pairs(SHAPES), scale=1.0)
    file = folder / "adapters.safetensors"
    halves = {name: value.astype(dtype) for name, value in mx.load(str(file)).items()}
    mx.eval(halves)
    mx.save_safetensors(str(file), halves)
    found = read(folder, MOST)
    for name, factors in found.modules.items():
        wanted = np.array(halves[f"{name}.lora_a"].astype(mx.float32))
        assert np.array_equal(factors.a, wanted)


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "biases"),
        ({"lora_bias": True}, "biases"),
        ({"peft_type": "IA3"}, "IA3"),
        ({"init_lora_weights": "pissa_niter_4"}, "pissa"),
        ({"alora_invocation_tokens": [1]}, "aLoRA"),
        ({"layer_replication": [[0, 1]]}, "replicates"),
        ({"trainable_token_indices": [5]}, "embeddings"),
        ({"r": 3}, "rank 4"),
        ({"r": None}, "no r"),
        ({"r": 0}, "no r"),
        ({"lora_alpha": "many"}, "lora_alpha"),
        ({"lora_alpha": 1e300}, "lora_alpha"),
        ({"rank_pattern": {"(a+)+b": 4}}, "not understood"),
        ({"rank_pattern": {"a?" * 40 + "a" * 40: 1}}, "not understood"),
        ({"rank_pattern": {"(a|ab)" * 20: 1}}, "not understood"),
        ({"rank_pattern": {".*.*.*X": 1}}, "not understood"),
        ({"alpha_pattern": {"[": 4}}, "not understood"),
        ({"alpha_pattern": [1]}, "should be an object"),
    ],
)
def test_what_peft_has_and_cannot_be_served_is_refused(
    config: dict[str, Any], word: str, tmp_path: Path
) -> None:
    folder = write_peft(tmp_path / "a", random_pairs(SHAPES), **config)
    with pytest.raises(AdapterError, match=word):
        read(folder, MOST)


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ({"fine_tune_type": "dora"}, "dora"),
        ({"fine_tune_type": "full"}, "full"),
        ({"lora_parameters": {"rank": 4}}, "scale"),
        ({"lora_parameters": {"rank": 4, "scale": 10**400}}, "finite"),
        ({"lora_parameters": {"rank": 9, "scale": 1}}, "rank 4"),
        ({"lora_parameters": None}, "lora_parameters"),
    ],
)
def test_what_mlx_lm_has_and_cannot_be_served_is_refused(
    config: dict[str, Any], word: str, tmp_path: Path
) -> None:
    folder = write_mlx(tmp_path / "a", random_pairs(SHAPES), **config)
    with pytest.raises(AdapterError, match=word):
        read(folder, MOST)


def test_a_broken_folder_is_refused_and_named(tmp_path: Path) -> None:
    folder = write_mlx(tmp_path / "a", random_pairs(SHAPES))
    file, whole = folder / "adapters.safetensors", (folder / "adapters.safetensors").read_bytes()
    with pytest.raises(AdapterError, match="no adapter folder"):
        read(tmp_path / "nowhere", MOST)
    with pytest.raises(AdapterError, match="cannot be read"):
        read(tmp_path, MOST)
    with pytest.raises(AdapterError, match=r"--lora-memory"):
        read(folder, len(whole) - 1)
    header = int.from_bytes(whole[:8], "little")
    for broken in (
        b"",
        whole[:7],
        whole[: 8 + header // 2],
        whole[:-1],
        (1 << 60).to_bytes(8, "little") + whole[8:],
        whole[:8] + b"[" + whole[9:],
        whole.replace(b'"shape":[32,', b'"shape":[-2,'),
        whole.replace(b'"shape":[32,', b'"shape":"2",'),
        whole.replace(b'"data_offsets":[0,', b'"data_offsets":[9,'),
        whole.replace(b'"dtype":"F32"', b'"dtype":"I32"'),
    ):
        file.write_bytes(broken)
        with pytest.raises(AdapterError):
            read(folder, MOST)
    file.write_bytes(whole)
    (folder / "adapter_config.json").write_text("[" * 100_000)
    with pytest.raises(AdapterError, match="JSON"):
        read(folder, MOST)
    (folder / "adapter_config.json").write_text(json.dumps({"rank": 8}))
    with pytest.raises(AdapterError, match="neither"):
        read(folder, MOST)


def test_values_that_are_not_finite_or_not_lora_are_refused(tmp_path: Path) -> None:
    pairs = random_pairs(SHAPES)
    pairs["model.layers.1.mlp.down_proj"][0][3, 1] = np.nan
    with pytest.raises(AdapterError, match="not finite"):
        read(write_mlx(tmp_path / "nan", pairs), MOST)
    pairs["model.layers.1.mlp.down_proj"][0][3, 1] = 1.0
    pairs["model.layers.1.mlp.down_proj"][1][3, 1] = 100.0
    with pytest.raises(AdapterError, match="not finite"):
        read(write_mlx(tmp_path / "scaled", pairs, scale=1e38), MOST)
    folder = write_peft(tmp_path / "dora", random_pairs(SHAPES))
    file = str(folder / "adapter_model.safetensors")
    weights = mx.load(file)
    mx.eval(weights)
    weights["base_model.model.lm_head.weight"] = mx.zeros((4, 4))
    mx.save_safetensors(file, weights)
    with pytest.raises(AdapterError, match=r"lm_head\.weight"):
        read(folder, MOST)


def test_an_adapter_of_a_model_inside_another_finds_its_modules(tmp_path: Path) -> None:
    pairs = {
        f"model.language_model.{n.removeprefix('model.')}": p
        for n, p in random_pairs(SHAPES).items()
    }
    adapter = read(write_peft(tmp_path / "a", pairs), MOST)
    found = fitted(adapter, {f"language_model.{n}": shape for n, shape in SHAPES.items()}, "a")
    assert sorted(found.modules) == sorted(f"language_model.{n}" for n in SHAPES)
    towers = {f"{tower}.{n}": shape for tower in ("text", "vision") for n, shape in SHAPES.items()}
    with pytest.raises(AdapterError, match="no linear layer"):
        fitted(adapter, towers, "a")


@pytest.mark.parametrize(
    "pattern",
    [
        "down_proj",
        "model.layers.0.mlp.down_proj",
        r"^model\.layers\.\d+\.mlp\.down_proj$",
        r"layers\.[0-9]+\.mlp\.(down_proj|up_proj)",
        r".*mlp\.down_proj",
        "(?:gate|down)_proj",
    ],
)
def test_patterns_that_name_modules_are_understood(pattern: str) -> None:
    found = peft._patterns({"rank_pattern": {pattern: 7}}, "rank_pattern", Path())
    found.deadline = time.monotonic() + 60
    assert found.chosen("model.layers.0.mlp.down_proj", 4) == 7
    assert found.chosen("model.layers.0.mlp.other", 4) == 4


def test_patterns_have_a_deadline_together() -> None:
    many = {f"a{i}": 1 for i in range(100)}
    found = peft._patterns({"rank_pattern": many}, "rank_pattern", Path())
    with pytest.raises(AdapterError, match="takes longer"):
        found.chosen("model.b", 4)
