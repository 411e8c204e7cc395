"""Whole models by our own kernels: the same logprobs as MLX's with float32 weights, and the same bits
however tokens come: at once, in pieces, one by one, and on any number of threads.

Both compute in float32 and add in different orders: logprobs of these models, which lie between -15 and 0,
differ by some 1e-5, and 1e-4 is allowed.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("llvmlite")

from native_models import Kind, in_pieces, logprobs, plain_cache, random_tokens, run
from native_pages import PagedSequences

from millrace.native.model import NativeModel
from millrace.native.plan import plan

ALLOWED = 1e-4
TOKENS = random_tokens(150)
"""More than a block of keys, and no whole number of tiles."""

SCALED = {
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "longrope": {"rope_type": "longrope", "original_max_position_embeddings": 64,
                 "short_factor": [1.0] * 32, "long_factor": [1.0 + i / 8 for i in range(32)]},
}  # fmt: skip

GEMMA = {"sliding_window": 20, "sliding_window_pattern": 3, "query_pre_attn_scalar": 64}

KINDS = {
    "llama": Kind(),
    "llama of 1 head": Kind(heads=(1, 1)),
    "llama with biases": Kind(more={"attention_bias": True, "mlp_bias": True}),
    "llama with a head of its own": Kind(more={"tie_word_embeddings": False}),
    "llama with windows": Kind(
        layers=3,
        more={
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "sliding_window": 37,
        },
    ),
    "qwen2": Kind("qwen2"),
    "qwen2 with seven queries to a key": Kind("qwen2", heads=(14, 2), hidden=896),
    "qwen3": Kind("qwen3"),
    "gemma3": Kind("gemma3_text", heads=(4, 1), head_size=256, layers=3, more=GEMMA),
    "gemma3, tied, scaled": Kind(
        "gemma3_text",
        layers=4,
        more=GEMMA | {"tied": True, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    ),
    **{f"llama, {name}": Kind(more={"rope_scaling": how}) for name, how in SCALED.items()},
    **{
        f"{heads[0]} queries of {size} for {heads[1]} keys": Kind(heads=heads, head_size=size)
        for heads, size in (
            ((2, 2), 64), ((6, 2), 64), ((7, 1), 64), ((14, 2), 64), ((8, 1), 64),
            ((4, 2), 96), ((6, 2), 96), ((2, 1), 128), ((8, 1), 128), ((13, 1), 64),
        )
    },
    "float16": Kind(dtype=mx.float16),
    "bfloat16": Kind("qwen3", dtype=mx.bfloat16),
}  # fmt: skip


def check_against_mlx(kind: Kind, tokens: list[int], allowed: float = ALLOWED) -> None:
    own = logprobs(run(kind.native(), tokens))
    theirs = logprobs(run(kind.in_float32(), tokens))
    assert own.min() < -6, "weights so small that nothing is tested"
    np.testing.assert_allclose(own, theirs, atol=allowed, rtol=0)


@pytest.mark.parametrize("name", KINDS)
def test_logprobs_are_those_of_float32(name: str) -> None:
    check_against_mlx(KINDS[name], TOKENS)


@pytest.mark.parametrize(
    ("bits", "group", "dtype"),
    [
        (bits, group, (mx.float32, mx.float16, mx.bfloat16)[(n + n // 3) % 3])
        for n, (bits, group) in enumerate(product((2, 3, 4, 5, 6, 8), (32, 64, 128)))
    ],
    ids=str,
)
def test_logprobs_of_quantised_weights_are_those_of_float32(
    bits: int, group: int, dtype: mx.Dtype
) -> None:
    check_against_mlx(Kind(bits=bits, group=group, dtype=dtype), TOKENS[:30])


def test_a_model_quantised_layer_by_layer_differently_is_run_as_it_is() -> None:
    def build() -> Any:
        import mlx.nn as nn

        model = Kind(more={"tie_word_embeddings": False}).build()
        nn.quantize(
            model,
            class_predicate=lambda path, module: (
                False
                if not hasattr(module, "to_quantized") or "v_proj" in path
                else {"group_size": 32, "bits": 8}
                if "embed" in path or "down" in path
                else {"group_size": 128, "bits": 3}
                if "gate" in path
                else True
            ),
        )
        return model

    theirs = logprobs(run(build(), TOKENS[:30]))
    model = build()
    own = logprobs(run(NativeModel(plan(model), 2, model.args), TOKENS[:30]))
    np.testing.assert_allclose(own, theirs, atol=ALLOWED, rtol=0)


SAME_BITS = {
    "quantised to 4 bits": Kind(bits=4, dtype=mx.bfloat16),
    "with windows": KINDS["llama with windows"],
    "with biases in bfloat16": Kind("qwen2", heads=(7, 1), hidden=448, dtype=mx.bfloat16),
    "eight queries to a key": Kind("qwen3", heads=(8, 1), bits=8, group=32),
    "heads of 96": Kind(heads=(6, 2), head_size=96, dtype=mx.float16),
    "gemma3": Kind("gemma3_text", (4, 1), 256, layers=3, bits=4, group=32, more=GEMMA),
}


@pytest.fixture(scope="module", params=SAME_BITS)
def same_bits(request: pytest.FixtureRequest) -> tuple[NativeModel, bytes]:
    model = SAME_BITS[request.param].native()
    return model, run(model, TOKENS).tobytes()


def test_tokens_one_by_one_give_the_same_bits(same_bits: tuple[NativeModel, bytes]) -> None:
    model, whole = same_bits
    assert in_pieces(model, TOKENS, list(range(1, len(TOKENS)))).tobytes() == whole


@settings(max_examples=15)
@given(st.lists(st.integers(1, len(TOKENS) - 1), max_size=12))
def test_tokens_in_pieces_give_the_same_bits(
    same_bits: tuple[NativeModel, bytes], borders: list[int]
) -> None:
    model, whole = same_bits
    assert in_pieces(model, TOKENS, sorted(borders)).tobytes() == whole


@pytest.mark.parametrize("threads", [1, 3, 5])
def test_any_number_of_threads_gives_the_same_bits(
    same_bits: tuple[NativeModel, bytes], threads: int
) -> None:
    model, whole = same_bits
    other = NativeModel(model._plan, threads, model.args)
    assert run(other, TOKENS).tobytes() == whole
    borders = [1, 2, 100, 101, 102, 104, 130, 131, 135, 140, 149]
    assert in_pieces(other, TOKENS, borders).tobytes() == whole


def test_sequences_in_a_pass_give_the_same_bits(same_bits: tuple[NativeModel, bytes]) -> None:
    model, whole = same_bits
    sequences = PagedSequences(model)
    others = [random_tokens(len(TOKENS), seed) for seed in range(1, 4)]
    rows = [others[0], TOKENS, *others[1:]]
    found = [
        sequences.run({number: row[a:b] for number, row in enumerate(rows)})[1]
        for a, b in ((0, 90), (90, 150))
    ]
    assert np.concatenate(found).tobytes() == whole


def test_passes_without_logits_leave_the_same_state(same_bits: tuple[NativeModel, bytes]) -> None:
    model, whole = same_bits
    sequences = PagedSequences(model)
    sequences.prefill(0, TOKENS[:97])
    assert whole.endswith(sequences.run({0: TOKENS[97:]})[0].tobytes())


def test_tokens_that_were_taken_back_leave_no_trace(same_bits: tuple[NativeModel, bytes]) -> None:
    model, whole = same_bits
    cache = model.make_cache()
    run(model, TOKENS[:60], cache)
    run(model, random_tokens(25, 9), cache)
    for layer in cache:
        layer.trim(25)
    assert whole.endswith(run(model, TOKENS[60:], cache).tobytes())


def test_logits_that_were_given_stay_when_the_next_are_made() -> None:
    model = Kind().native()
    cache = plain_cache(model)
    first = model(mx.array([TOKENS[:5]]), cache)
    before = np.array(first)
    model(mx.array([TOKENS[5:10]]), cache)
    assert np.array_equal(np.array(first), before)
