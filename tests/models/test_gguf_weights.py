"""Imported tensors: equal to the `gguf` package's own reading, and the same model to mlx-lm."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf_files
import mlx.core as mx
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as Kind
from gguf_files import ARCHITECTURES, write_gguf
from mlx.utils import tree_map
from mlx_lm.utils import dequantize_model, load_model

from millrace.models.gguf import convert
from millrace.models.gguf.writer import SafetensorsWriter, as_array
from millrace.native.compact import KINDS

PACKED = {
    Kind.Q4_0: 4,
    Kind.Q4_1: 4,
    Kind.Q5_0: 5,
    Kind.Q5_1: 5,
    Kind.Q8_0: 8,
    Kind.Q4_K: 4,
    Kind.Q5_K: 5,
}
FLOATS = (Kind.F32, Kind.F16, Kind.BF16)
WIDENED = (
    Kind.Q2_K,
    Kind.Q3_K,
    Kind.Q6_K,
    Kind.IQ1_S,
    Kind.IQ1_M,
    Kind.IQ2_XXS,
    Kind.IQ2_XS,
    Kind.IQ2_S,
    Kind.IQ3_XXS,
    Kind.IQ3_S,
    Kind.IQ4_NL,
    Kind.IQ4_XS,
    Kind.TQ1_0,
    Kind.TQ2_0,
    Kind.MXFP4,
)


def imported(source: Path, folder: Path, *, exact: bool = False) -> Path:
    folder.mkdir()
    convert(source, folder, exact=exact)
    return folder


def to_float32(value: Any) -> Any:
    floating = isinstance(value, mx.array) and mx.issubdtype(value.dtype, mx.floating)
    return value.astype(mx.float32) if floating else value


def load_wide(folder: Path) -> Any:
    """The folder as mlx-lm loads it, dequantised in float32."""
    model, _ = load_model(folder)
    model.update(tree_map(to_float32, model.parameters()))
    return dequantize_model(model)


def values_in(folder: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Every tensor of the folder in float32, quantised ones by MLX's own dequantisation."""
    stored: dict[str, mx.array] = {}
    for path in folder.glob("model*.safetensors"):
        stored |= mx.load(str(path))
    setting = json.loads((folder / "config.json").read_text()).get("quantization", {})
    values = {}
    for name, array in stored.items():
        module, _, part = name.rpartition(".")
        if part in ("scales", "biases"):
            continue
        if part == "weight" and f"{module}.scales" in stored:
            bits = setting.get(module, setting)["bits"]
            scales = stored[f"{module}.scales"].astype(mx.float32)
            biases = stored[f"{module}.biases"].astype(mx.float32)
            array = mx.dequantize(array, scales, biases, group_size=32, bits=bits)
        values[name] = np.array(array.astype(mx.float32))
    return values


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert np.array_equal(found[name], values), name


@pytest.mark.parametrize("kind", [*PACKED, *FLOATS], ids=lambda k: k.name)
def test_every_tensor_is_exact(tmp_path: Path, kind: Kind) -> None:
    generated = write_gguf(tmp_path / "m.gguf", "llama", kind, untied=True)
    folder = imported(generated.path, tmp_path / "out")
    assert_equal(values_in(folder), generated.weights)


@pytest.mark.parametrize("kind", WIDENED, ids=lambda k: k.name)
def test_types_without_an_mlx_form_are_widened(tmp_path: Path, kind: Kind) -> None:
    generated = write_gguf(tmp_path / "m.gguf", "llama", kind)
    assert_equal(
        values_in(imported(generated.path, tmp_path / "exact", exact=True)), generated.weights
    )
    found = values_in(imported(generated.path, tmp_path / "out"))
    for name, values in generated.weights.items():
        assert np.array_equal(found[name], values.astype(np.float16)), name


def compact_values_in(folder: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Every tensor of the folder's compact file in float32; codes that are not there are MLX's."""
    stored = dict(mx.load(str(folder / "packed.safetensors")))
    for_mlx = mx.load(str(folder / "model.safetensors"))
    values = {}
    for name in [name for name in stored if name.endswith(".scales")]:
        module, kind, _ = name.rsplit(".", 2)
        form = KINDS[kind]
        parts = {part: stored.pop(f"{module}.{kind}.{part}") for part in form.parts}
        words = parts.get("codes", for_mlx[f"{module}.weight"])
        found = spread_out(np.array(words), form.bits).astype(np.float32) - form.zero
        scales = per_input(parts["scales"], form.group) * per_input(parts["scale_factors"], 256)
        found *= scales
        if form.minima:
            factors = per_input(parts["minimum_factors"], 256)
            found -= per_input(parts["minima"], form.group) * factors
        values[f"{module}.weight"] = found
    assert not stored
    return values


def spread_out(words: np.ndarray[Any, Any], bits: int) -> np.ndarray[Any, Any]:
    stream = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")
    each = stream.reshape(len(words), -1, bits)
    return (each << np.arange(bits, dtype=np.uint8)).sum(-1)


def per_input(values: mx.array, count: int) -> np.ndarray[Any, Any]:
    return np.array(values.astype(mx.float32)).repeat(count, axis=1)


@pytest.mark.parametrize("name", KINDS)
def test_k_quants_are_exact_in_a_file_of_their_own(tmp_path: Path, name: str) -> None:
    generated = write_gguf(tmp_path / "m.gguf", "llama", Kind[name], untied=True)
    folder = imported(generated.path, tmp_path / "out")
    matrices = {n: v for n, v in generated.weights.items() if v.ndim == 2}
    assert_equal(compact_values_in(folder), matrices)
    load_model(folder)


@pytest.mark.parametrize("kind", [Kind.F32, Kind.Q4_1, Kind.IQ4_XS], ids=lambda k: k.name)
def test_other_types_have_no_second_file(tmp_path: Path, kind: Kind) -> None:
    folder = imported(write_gguf(tmp_path / "m.gguf", kind=kind).path, tmp_path / "out")
    assert [path.name for path in folder.glob("*.safetensors")] == ["model.safetensors"]


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("kind", [Kind.F32, Kind.Q4_1, Kind.Q8_0, Kind.Q5_K], ids=lambda k: k.name)
def test_mlx_runs_it_as_the_same_weights(tmp_path: Path, arch: str, kind: Kind) -> None:
    generated = write_gguf(tmp_path / "m.gguf", arch, kind, untied=arch != "gemma3")
    folder = imported(generated.path, tmp_path / "out")
    assert_equal(values_in(folder), generated.weights)
    model = load_wide(folder)
    straight = type(model)(model.args)
    straight.load_weights(
        [(n, mx.array(v)) for n, v in generated.weights.items()], strict=arch != "gemma3"
    )
    if arch == "gemma3":
        straight.tie_word_embeddings = True
    tokens = mx.array([[1, 5, 9, 2, 77, 260, 11, 3, 8, 120, 45, 6]])
    assert np.array_equal(np.array(model(tokens)), np.array(straight(tokens)))
    assert np.isfinite(np.array(model(tokens))).all()


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_tied_and_untied_heads(tmp_path: Path, arch: str) -> None:
    tied = imported(write_gguf(tmp_path / "t.gguf", arch).path, tmp_path / "tied")
    untied = imported(write_gguf(tmp_path / "u.gguf", arch, untied=True).path, tmp_path / "untied")
    for folder, expected in ((tied, True), (untied, False)):
        assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is expected
        assert ("lm_head.weight" in values_in(folder)) is not expected
        load_model(folder)


def test_rows_of_rotated_biases_are_put_back(tmp_path: Path) -> None:
    generated = write_gguf(tmp_path / "m.gguf", biases=("attn_q", "attn_k", "attn_v"))
    folder = imported(generated.path, tmp_path / "out")
    found = values_in(folder)
    for name, values in generated.weights.items():
        assert np.array_equal(found[name], values), name
    assert not found["model.layers.0.self_attn.o_proj.bias"].any()
    load_model(folder)


def test_mixed_types_are_named_per_layer(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    raw, _ = gguf_files.blocks(rng, (len(gguf_files.TOKENS), gguf_files.HIDDEN), Kind.F16)
    generated = write_gguf(
        tmp_path / "m.gguf",
        kind=Kind.Q4_0,
        drop=("token_embd.weight",),
        tensors={"token_embd.weight": raw},
    )
    folder = imported(generated.path, tmp_path / "out")
    generated.weights["model.embed_tokens.weight"] = raw.astype(np.float32)
    assert_equal(values_in(folder), generated.weights)
    load_model(folder)


def test_bfloat16_models_stay_in_bfloat16(tmp_path: Path) -> None:
    generated = write_gguf(tmp_path / "m.gguf", kind=Kind.BF16)
    folder = imported(generated.path, tmp_path / "out")
    stored = mx.load(str(folder / "model.safetensors"))
    assert stored["model.embed_tokens.weight"].dtype == mx.bfloat16
    assert json.loads((folder / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_large_models_become_shards_with_an_index(tmp_path: Path) -> None:
    writer = SafetensorsWriter(tmp_path, names=5, shard=100)
    arrays = {f"t{i}": np.arange(10, dtype=np.float32) + i for i in range(5)}
    for name, values in arrays.items():
        writer.add(name, as_array(values))
    writer.close()
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 200
    assert set(index["weight_map"].values()) == {p.name for p in tmp_path.glob("*.safetensors")}
    for name, values in arrays.items():
        stored = mx.load(str(tmp_path / index["weight_map"][name]))
        assert np.array_equal(np.array(stored[name]), values)
