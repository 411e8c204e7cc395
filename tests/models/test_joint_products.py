"""Layers that read the same input, as one product: the same numbers, and nothing kept behind a pass."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import llama, qwen2, qwen3

from millrace.models.adapters.stacks import AdapterStacks
from millrace.models.joint_products import JointLinear, JointQuantizedLinear, join_products
from millrace.models.quantized import flatten

SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "vocab_size": 100,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rope_theta": 1e4,
    "tie_word_embeddings": True,
}
KINDS = {"qwen3": qwen3, "qwen2": qwen2, "llama": llama}
TOKENS = mx.array([[5, 1, 7, 9], [2, 8, 8, 1]])


def build(kind: str, bits: int | None = None) -> Any:
    mx.random.seed(3)
    module = KINDS[kind]
    model = module.Model(module.ModelArgs.from_dict(SHAPE | {"model_type": kind}))
    if bits:
        nn.quantize(model, group_size=32, bits=bits)
        flatten(model)
    mx.eval(model.parameters())
    return model


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_a_joint_product_changes_no_logit(kind: str, bits: int | None) -> None:
    model = build(kind, bits)
    before, size = model(TOKENS), sum(w.nbytes for _, w in parameters(model))
    mx.eval(before)
    join_products(model)
    part = JointQuantizedLinear if bits else JointLinear
    parts = [each for each in model.modules() if isinstance(each, part)]
    assert len(parts) == 2 * 5
    assert mx.allclose(model(TOKENS), before, rtol=1e-4, atol=1e-4)
    assert sum(w.nbytes for _, w in parameters(model)) == size
    assert all(each.joint._input is None for each in parts)
    assert not any(output is not None for each in parts for output in each.joint._outputs)


def parameters(model: Any) -> list[tuple[str, mx.array]]:
    from mlx.utils import tree_flatten

    return tree_flatten(model.parameters())  # type: ignore[no-any-return]


def test_a_part_that_is_called_alone_or_out_of_order_gives_its_own_outputs() -> None:
    model = build("qwen3")
    attention = model.model.layers[0].self_attn
    x, y = (mx.random.normal((3, 1, 64)) for _ in range(2))
    names = ("q_proj", "k_proj", "v_proj")
    want = {(n, i): attention[n](z) for n in names for i, z in enumerate((x, y))}
    join_products(model)
    for calls in ([("v_proj", 0), ("k_proj", 1), ("v_proj", 1), ("q_proj", 1), ("q_proj", 0)],) * 2:
        for name, which in calls:
            found = attention[name]((x, y)[which])
            assert mx.allclose(found, want[name, which], atol=1e-5), (name, which)


def test_layers_that_differ_stay_as_they_are() -> None:
    model = build("qwen3")
    layer = model.model.layers[0]
    layer.self_attn.k_proj = nn.Linear(64, 32, bias=True)
    layer.mlp.up_proj = nn.QuantizedLinear.from_linear(layer.mlp.up_proj, 32, 8)
    before = model(TOKENS)
    join_products(model)
    assert type(layer.self_attn.q_proj) is nn.Linear and type(layer.mlp.gate_proj) is nn.Linear
    assert type(model.model.layers[1].self_attn.q_proj) is JointLinear
    assert mx.allclose(model(TOKENS), before, atol=1e-5)


def test_adapters_find_the_parts_of_a_joint_product() -> None:
    model = build("qwen3")
    before = AdapterStacks(model).shapes
    join_products(model)
    assert AdapterStacks(model).shapes == before
