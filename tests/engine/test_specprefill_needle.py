"""A model that is built to copy what stands a given distance before it finds its needle in a prompt of
which nearly nothing is run: only right positions can do that.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from engine.harness import Bench
from native.native_models import VOCAB, Kind

from millrace.engine.specprefill.selection import CHUNK, Kept
from millrace.native.model import NativeModel
from millrace.native.plan import plan
from millrace.protocol import Choice, Sampling, Submit
from millrace.protocol.specprefill import SparsePrefill

BACK = 800
"""How far back the model looks."""
COPIED = 8
HIDDEN, HEAD = 128, 64
PROMPTS = [BACK + 40 + 96 * k for k in range(10)]
"""Lengths, and so ten places of the needle."""


def _copying() -> Any:
    """One layer: all tokens ask for, and offer, the same vector, turned so that the two meet at the
    distance; what is found there is written over what the token itself is."""
    model = Kind("llama", layers=1).build()
    codes = np.sign(np.random.default_rng(0).standard_normal((VOCAB, HIDDEN)))
    codes[:, 0] = 1.0  # what all tokens have in common
    frequencies = 10_000.0 ** (-np.arange(HEAD // 2) / (HEAD // 2))
    offered, asked = np.zeros((2, HEAD, HIDDEN))
    offered[: HEAD // 2, 0] = 10.0
    asked[:, 0] = 10.0 * np.concatenate([np.cos(BACK * frequencies), -np.sin(BACK * frequencies)])
    out = np.zeros((HIDDEN, 4 * HEAD))
    out[:HEAD, :HEAD] = out[HEAD:, 2 * HEAD : 3 * HEAD] = 8.0 * np.eye(HEAD)
    layer = model.layers[0]
    for module, weight in (
        (model.model.embed_tokens, codes),
        (layer.self_attn.q_proj, np.tile(asked, (4, 1))),
        (layer.self_attn.k_proj, np.tile(offered, (2, 1))),
        (layer.self_attn.v_proj, np.eye(HIDDEN)),
        (layer.self_attn.o_proj, out),
        (layer.mlp.down_proj, np.zeros(layer.mlp.down_proj.weight.shape)),
        (layer.input_layernorm, np.ones(HIDDEN)),
        (model.model.norm, np.ones(HIDDEN)),
    ):
        module.weight = mx.array(weight, mx.float32)
    return model


def _native() -> Any:
    model = _copying()
    return NativeModel(plan(model), 2, model.args)


@pytest.fixture(scope="module", params=["native", "MLX"])
def model(request: pytest.FixtureRequest) -> Any:
    return _native() if request.param == "native" else _copying()


def _ask(id: int, prompt: list[int], sparse: SparsePrefill | None) -> Submit:
    return Submit(id, prompt, [Choice(0, 1)], COPIED, Sampling(0.0), sparse=sparse)


def test_what_stands_at_its_distance_is_found_at_ten_places(model: Any) -> None:
    bench = Bench(model, draft=model)
    dice = np.random.default_rng(7)
    prompts = [dice.integers(0, VOCAB, length).tolist() for length in PROMPTS]
    for id, prompt in enumerate(prompts):
        length = len(prompt)
        needle = prompt[length - 1 - BACK :][:COPIED]
        middle = length - 512 - CHUNK
        found = bench.run([_ask(id, prompt, SparsePrefill(2 * CHUNK / middle))])[id, 0]
        assert found == needle, id
        assert Kept.of(bench.selected[id].kept, length).count <= 512 + 4 * CHUNK < length
        # The same tokens without the needle, or one place further: it is not there.
        for start in (CHUNK, 0):
            kept = [(0, start), (length - 512, length)] if start else [(length - 512, length)]
            lost = Bench(model, draft=model).run([_ask(1, prompt, SparsePrefill(1.0, kept=kept))])
            assert lost[1, 0] != needle
