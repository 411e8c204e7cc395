"""Adapters by our own kernels: what merged weights give, to rounding, and the same bits in any company."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from adapters_help import SMALL, Pairs, linear_shapes, merge, random_pairs
from native.native_models import Kind, plain_cache, random_tokens, run
from native.native_pages import PagedSequences

from millrace.models.adapters.folder import Factors
from millrace.native.model import NativeModel

KINDS = [
    Kind(),
    Kind(more={"tie_word_embeddings": False, "attention_bias": True}),
    Kind("qwen3", heads=(6, 2), hidden=192),
    Kind(
        "gemma3_text",
        heads=(4, 1),
        more={"sliding_window": 16, "sliding_window_pattern": 2, "query_pre_attn_scalar": 64},
    ),
    Kind(bits=4),
    Kind(dtype=mx.bfloat16, bits=8),
]
WHAT = [(8, ()), (5, SMALL), (40, ()), (1, ("o_proj", "down_proj")), (16, ("gate_proj", "lm_head"))]


def adapters(kind: Kind) -> dict[int, Pairs]:
    shapes = linear_shapes(kind.build())
    found = {
        slot: random_pairs(shapes, rank, slot, targets)
        for slot, (rank, targets) in enumerate(WHAT, 1)
    }
    return {slot: pairs for slot, pairs in found.items() if pairs}


def with_adapters(kind: Kind, threads: int = 2) -> NativeModel:
    model = kind.native(threads)
    for slot, pairs in adapters(kind).items():
        model.adapters.place(slot, factors(pairs))
    return model


def factors(pairs: Pairs) -> dict[str, Factors]:
    return {name: Factors(a, b * np.float32(0.5)) for name, (a, b) in pairs.items()}


def run_with(model: NativeModel, slot: int, tokens: list[int], cache: Any = None) -> Any:
    model.adapters.use([slot])
    return run(model, tokens, cache)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_an_adapter_gives_what_the_merged_weights_give(kind: Kind) -> None:
    model = with_adapters(kind)
    tokens = random_tokens(21)
    for slot, pairs in adapters(kind).items():
        wanted = run(merge(kind.in_float32(), pairs, 0.5), tokens)
        found = run_with(model, slot, tokens)
        assert np.abs(found - wanted).max() < 2e-4 * np.abs(wanted).max()
    assert np.array_equal(run_with(model, 0, tokens), run(kind.native(), tokens))


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS[:4], ids=str)
def test_rows_of_many_adapters_have_the_bits_that_each_has_alone(kind: Kind, threads: int) -> None:
    model = with_adapters(kind, threads)
    slots = [0, 3, 1, 2, 0, 1, 4, 3]
    prompts = [random_tokens(6, seed) for seed in range(len(slots))]
    alone = []
    for slot, prompt in zip(slots, prompts, strict=True):
        cache = plain_cache(model)
        pieces = [run_with(model, slot, prompt[a:b], cache) for a, b in ((0, 4), (4, 5), (5, 6))]
        alone.append(np.concatenate(pieces))
    sequences = PagedSequences(model)
    together: dict[int, list[Any]] = {number: [] for number in range(len(slots))}
    for a, b in ((0, 1), (1, 5), (5, 6)):
        found = sequences.run({n: p[a:b] for n, p in enumerate(prompts)}, slots)
        for number, logits in found.items():
            together[number].append(logits)
    for number, own in enumerate(alone):
        assert np.array_equal(np.concatenate(together[number]), own)


def test_a_slot_that_is_removed_leaves_the_others_and_its_memory() -> None:
    kind = KINDS[0]
    model, tokens = with_adapters(kind), random_tokens(9)
    held, before = model.adapters.nbytes, run_with(model, 1, tokens)
    pairs = adapters(kind)[2]
    assert model.adapters.needs(2, factors(pairs)) == held
    model.adapters.remove(2)
    assert model.adapters.nbytes < held
    assert np.array_equal(run_with(model, 1, tokens), before)
    assert np.array_equal(run_with(model, 2, tokens), run(kind.native(), tokens))
    model.adapters.place(2, factors(adapters(kind)[1]))
    assert np.array_equal(run_with(model, 2, tokens), before)


def test_a_batch_without_adapters_runs_the_program_it_always_ran() -> None:
    model = with_adapters(KINDS[0])
    run_with(model, 0, [5])
    (program,) = model._programs.values()
    plain = KINDS[0].native()
    run(plain, [5])
    (wanted,) = plain._programs.values()
    assert len(program.records) == len(wanted.records) and not program.stages.adapting
