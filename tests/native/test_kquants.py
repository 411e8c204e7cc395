"""K-quants in packed memory: the values that `gguf` reads, and one order of summation for any rows."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

pytest.importorskip("llvmlite")

from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Type
from gguf.quants import dequantize
from kernel_calls import Matrix, embed, multiply

from millrace.models.gguf.blocks import pack as mlx_form
from millrace.models.gguf.kquants import compact
from millrace.models.gguf.reader import GgufTensor
from millrace.native import compile, formats, library
from millrace.native.compact import KINDS
from millrace.native.packing import Array, Compact, PackedMatrix, Packer, pack, read_compact

OUTPUTS, INPUTS = 72, 512
"""Outputs fill no whole number of blocks; inputs are two spans."""
MLX_TYPES = (Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0)


def tensor(kind: Type, seed: int = 0, *, outputs: int = OUTPUTS) -> GgufTensor:
    """Random blocks whose factors are no odd floats; every code and every small integer occurs."""
    rng = np.random.default_rng(seed)
    block, size = GGML_QUANT_SIZES[kind]
    raw = rng.integers(0, 256, (outputs * INPUTS // block, size), dtype=np.uint8)
    for at in _factors(kind):
        factors = rng.normal(0, 0.01, len(raw)).astype(np.float16)
        raw[:, at : at + 2] = factors.view(np.uint8).reshape(-1, 2)
    return GgufTensor("t", (outputs, INPUTS), kind, raw.reshape(-1))


def _factors(kind: Type) -> tuple[int, ...]:
    """Where a block has its float16s."""
    places = {
        Type.Q2_K: (80, 82),
        Type.Q3_K: (108,),
        Type.Q4_K: (0, 2),
        Type.Q5_K: (0, 2),
        Type.Q6_K: (208,),
        Type.Q4_1: (0, 2),
        Type.Q5_1: (0, 2),
    }
    return places.get(kind, (0,))


def values_of(source: GgufTensor) -> Array:
    blocks = source.raw.reshape(source.shape[0], -1)
    found: Array = dequantize(blocks, source.kind).reshape(source.shape)
    return found


def layer_of(source: GgufTensor) -> Any:
    """The layer as the converted folder has it for MLX."""
    form = mlx_form(source)
    outputs, inputs = source.shape
    if form is None:
        layer = nn.Linear(inputs, outputs, bias=False)
        layer["weight"] = mx.array(values_of(source).astype(np.float16))
        return layer
    layer = nn.QuantizedLinear(inputs, outputs, bias=False, group_size=32, bits=form.bits)
    layer["weight"] = mx.array(form.weight)
    layer["scales"], layer["biases"] = mx.array(form.scales), mx.array(form.biases)
    return layer


def packed_from(source: GgufTensor) -> PackedMatrix:
    parts = compact(source)
    if parts is None:
        return pack(layer_of(source))
    arrays = {name: mx.array(values) for name, values in parts.items()}
    return pack(layer_of(source), Compact(source.kind.name, arrays))


def matrix_from(source: GgufTensor) -> Matrix:
    packed = packed_from(source)
    values = values_of(source).astype(np.float64)
    return Matrix(packed.form, packed.data, values, np.abs(values), packed.groups)


every_type = pytest.mark.parametrize(
    "kind", [*(Type[name] for name in KINDS), *MLX_TYPES], ids=lambda kind: kind.name
)


@every_type
def test_packed_values_are_those_that_gguf_reads(kind: Type) -> None:
    source = tensor(kind)
    assert np.array_equal(embed(matrix_from(source), np.arange(OUTPUTS)), values_of(source))


@every_type
def test_a_row_has_the_same_product_alone_and_among_others(kind: Type) -> None:
    matrix = matrix_from(tensor(kind))
    x = np.random.default_rng(1).normal(size=(25, INPUTS)).astype(np.float32)
    many = multiply(matrix, x)
    assert np.allclose(many[:, :OUTPUTS], x @ matrix.values.T, rtol=1e-4, atol=1e-4)
    for rows in (1, 2, 3, 4, 8, 9):
        assert multiply(matrix, x[:rows]).tobytes() == many[:rows].tobytes()


@pytest.mark.parametrize("kind", [Type.Q4_K, Type.Q5_0], ids=lambda kind: kind.name)
def test_codes_from_tables_are_those_without(
    kind: Type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    matrix = matrix_from(tensor(kind))
    x = np.random.default_rng(1).normal(size=(13, INPUTS)).astype(np.float32)
    with_tables = [multiply(matrix, x[:rows]) for rows in (1, 13)]
    with monkeypatch.context() as patch:
        patch.setattr(formats, "has_tables", lambda: False)
        patch.setattr(compile, "folder", lambda: tmp_path)
        patch.setattr(library, "of_format", cache(library.of_format.__wrapped__))
        without = [multiply(matrix, x[:rows]) for rows in (1, 13)]
    assert (tmp_path / f"{matrix.form.name}.o").is_file()
    for one, other in zip(with_tables, without, strict=True):
        assert one.tobytes() == other.tobytes()


def test_they_take_hardly_more_than_in_the_file() -> None:
    most = {"Q2_K": 3.125, "Q3_K": 4.5625, "Q4_K": 4.625, "Q5_K": 5.625, "Q6_K": 6.5625}
    for name, bits in most.items():
        matrix = packed_from(tensor(Type[name], outputs=128))
        assert matrix.nbytes * 8 / (128 * INPUTS) == bits


def test_centred_codes_have_no_biases() -> None:
    for kind in MLX_TYPES:
        form = packed_from(tensor(kind)).form
        assert form.biased == (kind in (Type.Q4_1, Type.Q5_1)), kind
        assert bool(form.zero) != form.biased


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_codes_of_every_width_that_mlx_has_are_read(bits: int) -> None:
    layer = nn.Linear(INPUTS, OUTPUTS, bias=False)
    quantized = nn.QuantizedLinear.from_linear(layer, group_size=64, bits=bits)
    parts = (quantized["weight"], quantized["scales"], quantized["biases"])
    expected = np.array(mx.dequantize(*parts, group_size=64, bits=bits))
    packed = pack(quantized)
    matrix = Matrix(packed.form, packed.data, expected, expected, packed.groups)
    assert np.allclose(embed(matrix, np.arange(OUTPUTS)), expected, rtol=0, atol=1e-6)


def test_weights_that_have_a_compact_form_are_never_read() -> None:
    source = tensor(Type.Q6_K)
    layer = layer_of(source)

    class Unread:
        shape, dtype = source.shape, mx.float16

    layer["weight"] = Unread()
    parts = {name: mx.array(values) for name, values in (compact(source) or {}).items()}
    assert pack(layer, Compact("Q6_K", parts)).form.codes == "u6"


def test_a_compact_form_of_another_shape_is_refused() -> None:
    other = {n: mx.array(v) for n, v in (compact(tensor(Type.Q6_K, outputs=80)) or {}).items()}
    with pytest.raises(ValueError, match="80 x 512"):
        pack(layer_of(tensor(Type.Q6_K)), Compact("Q6_K", other))
    del other["scales"]
    with pytest.raises(ValueError, match="no scales"):
        pack(layer_of(tensor(Type.Q6_K, outputs=80)), Compact("Q6_K", other))


def test_compact_forms_are_found_by_their_modules_names(tmp_path: Path) -> None:
    parts = compact(tensor(Type.Q6_K)) or {}
    arrays = {f"a.b.Q6_K.{name}": mx.array(values) for name, values in parts.items()}
    arrays |= {"other": mx.zeros(1), "a.other": mx.zeros(1), "a.b.other.scales": mx.zeros(1)}
    mx.save_safetensors(str(tmp_path / "packed.safetensors"), arrays)
    found = read_compact(tmp_path)
    assert list(found) == ["a.b"]
    assert found["a.b"].kind == "Q6_K"
    assert set(found["a.b"].arrays) == set(KINDS["Q6_K"].parts)

    model = nn.Module()
    model.a = nn.Module()
    model.a.b = layer_of(tensor(Type.Q6_K))
    packer = Packer(model, found)
    assert not found
    assert packer.pack(model.a.b).form.codes == "u6"
