"""What an import says about the model, and which models it refuses."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from gguf_files import BOS, CONTEXT, EOS, HEAD, HIDDEN, TEMPLATE, write_gguf
from mlx_lm.utils import load_model

from millrace.errors import ModelError
from millrace.models.gguf import convert


def imported(tmp_path: Path, arch: str = "llama", **options: Any) -> Path:
    folder = tmp_path / "out"
    folder.mkdir()
    convert(write_gguf(tmp_path / "m.gguf", arch, **options).path, folder)
    return folder


def read(folder: Path, name: str = "config.json") -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / name).read_text())
    return content


def llama3_factors(factor: float, window: int) -> np.ndarray[Any, Any]:
    factors = []
    for i in range(0, HEAD, 2):
        length = 2 * math.pi * 10000.0 ** (i / HEAD)
        if length < window / 4:
            factors.append(1.0)
        elif length > window:
            factors.append(factor)
        else:
            smooth = (window / length - 1) / 3
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


def test_a_folder_says_what_the_file_said(tmp_path: Path) -> None:
    folder = imported(tmp_path)
    config = read(folder)
    assert config["model_type"] == "llama"
    assert config["max_position_embeddings"] == CONTEXT
    assert config["bos_token_id"] == BOS
    assert config["eos_token_id"] == [EOS] == read(folder, "generation_config.json")["eos_token_id"]
    assert read(folder, "tokenizer_config.json")["chat_template"] == TEMPLATE


def test_all_ends_of_turn_are_named(tmp_path: Path) -> None:
    folder = imported(
        tmp_path, extra={"tokenizer.ggml.eos_token_id": 7, "tokenizer.ggml.eot_token_id": 9}
    )
    assert read(folder)["eos_token_id"] == [7, 9, EOS]


def test_llama3_rope_is_recognised(tmp_path: Path) -> None:
    factors = llama3_factors(32.0, 8192)
    folder = imported(tmp_path, tensors={"rope_freqs.weight": factors})
    assert read(folder)["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert_wavelengths(folder, factors)


def test_other_rope_tables_are_kept(tmp_path: Path) -> None:
    factors = np.linspace(1, 3, HEAD // 2, dtype=np.float32)
    folder = imported(tmp_path, tensors={"rope_freqs.weight": factors})
    assert_wavelengths(folder, factors)


def assert_wavelengths(folder: Path, factors: np.ndarray[Any, Any]) -> None:
    model, _ = load_model(folder)
    rope = model.layers[0].self_attn.rope
    plain = 10000.0 ** (np.arange(0, HEAD, 2) / HEAD)
    assert np.allclose(np.array(rope._freqs), plain * factors, rtol=1e-4)
    x = mx.random.normal((1, 1, 3, HEAD))
    expected = mx.fast.rope(
        x, HEAD, traditional=False, base=None, scale=1.0, offset=5, freqs=mx.array(plain * factors)
    )
    assert np.allclose(np.array(rope(x, offset=5)), np.array(expected), atol=1e-4)


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_scaled_rope(tmp_path: Path, kind: str) -> None:
    extra = {
        "qwen3.rope.scaling.type": kind,
        "qwen3.rope.scaling.factor": 4.0,
        "qwen3.rope.scaling.original_context_length": 128,
    }
    folder = imported(tmp_path, "qwen3", extra=extra)
    scaling = read(folder)["rope_scaling"]
    assert (scaling["rope_type"], scaling["factor"]) == (kind, 4.0)
    load_model(folder)


def test_gemma_windows(tmp_path: Path) -> None:
    config = read(imported(tmp_path, "gemma3"))
    assert config["model_type"] == "gemma3_text"
    assert (config["sliding_window"], config["sliding_window_pattern"]) == (8, 2)
    assert config["rope_local_base_freq"] == 10000.0
    assert config["query_pre_attn_scalar"] == HEAD
    assert config["head_dim"] == HEAD


@pytest.mark.parametrize(
    ("arch", "options", "words"),
    [
        ("mamba", {}, "architecture 'mamba'"),
        ("llama", {"extra": {"llama.expert_count": 8}}, "mixture of experts"),
        ("llama", {"drop": ("blk.1.ffn_up.weight",)}, "'blk.1.ffn_up.weight' is missing"),
        ("llama", {"tensors": {"blk.0.odd.weight": np.ones(4, np.float32)}}, "blk.0.odd.weight"),
        ("llama", {"extra": {"llama.rope.dimension_count": 32}}, "32 are rotated"),
        ("llama", {"extra": {"llama.embedding_length": HIDDEN * 2}}, "columns"),
        ("qwen2", {"extra": {"qwen2.rope.scaling.type": "odd",
                             "qwen2.rope.scaling.factor": 2.0}}, "'odd'"),
        ("llama", {"extra": {"tokenizer.ggml.model": "bert"}}, "kind 'bert'"),
        ("llama", {"extra": {"tokenizer.ggml.pre": "odd"}}, "'odd'"),
        ("llama", {"extra": {"llama.block_count": "two"}}, "should be int"),
    ],
)  # fmt: skip
def test_refusals_name_the_cause(
    tmp_path: Path, arch: str, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ModelError, match=words) as raised:
        imported(tmp_path, arch, **options)
    assert "m.gguf" in raised.value.message
