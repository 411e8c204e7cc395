"""Tokens at positions that their places do not tell: right by construction, harmless where nobody asks."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
import tiny
from mlx_lm.models import rope_utils
from native.native_models import Kind

from millrace.engine.runner import Runner, SequenceRun
from millrace.errors import ModelError
from millrace.models.rotations import Rotation, Rotations, rotate

TOKENS = [(7 * k) % 61 + 3 for k in range(40)]
KEPT = [*range(6), *range(11, 19), *range(30, 40)]
GEMMA = {"sliding_window": 16, "sliding_window_pattern": 2, "query_pre_attn_scalar": 64}


def _rotated(kind: str) -> Any:
    model = tiny.build(kind)
    rotate(model)
    return model


MODELS: dict[str, Callable[[], Any]] = {
    "llama by MLX": lambda: _rotated("llama"),
    "qwen3 by MLX": lambda: _rotated("qwen3"),
    "gemma3 by MLX": lambda: _rotated("gemma3_text"),
    "gpt-oss by MLX": lambda: _rotated("gpt_oss"),
    "llama": lambda: Kind().native(),
    "qwen2": lambda: Kind("qwen2", heads=(6, 2), hidden=192, bits=4).native(),
    "qwen3": lambda: Kind("qwen3").native(),
    "gemma3": lambda: Kind("gemma3_text", layers=4, more=GEMMA).native(),
}


@pytest.fixture(params=list(MODELS), scope="module")
def runner(request: pytest.FixtureRequest) -> Runner:
    return Runner(MODELS[request.param]())


def _run(
    runner: Runner, number: int, tokens: list[int], positions: list[int] | None, pieces: int = 1
) -> mx.array:
    """Logits of all tokens of a sequence that begins with them."""
    runner.begin(number)
    size = -(-len(tokens) // pieces)
    found = []
    for at in range(0, len(tokens), size):
        some = None if positions is None else positions[at : at + size]
        part = tokens[at : at + size]
        run = SequenceRun(number, len(part), positions=some)
        found.append(runner.run(mx.array(part, mx.int32), [run], range(len(part))))
    mx.eval(found)
    return mx.concatenate(found)


def test_positions_that_are_the_places_change_nothing(runner: Runner) -> None:
    dense = _run(runner, 1, TOKENS, None)
    told = _run(runner, 2, TOKENS, list(range(len(TOKENS))))
    assert np.allclose(dense, told, atol=1e-5)
    assert mx.array_equal(dense.argmax(axis=-1), told.argmax(axis=-1))


def test_kept_tokens_are_turned_as_in_the_whole_prompt(runner: Runner) -> None:
    """In the first layer a key depends on its token and position alone."""
    dense, sparse = _run(runner, 1, TOKENS, None), _run(runner, 2, [TOKENS[k] for k in KEPT], KEPT)
    if 0 in runner.layout.cuttable:  # a window lets go of the first
        whole, cut = runner.keys(1, 0, len(TOKENS)), runner.keys(2, 0, len(KEPT))
        assert np.allclose(whole[:, mx.array(KEPT)], cut, atol=1e-6)
    # Those that see all that came before them in the whole prompt, too.
    assert np.allclose(dense[:6], sparse[:6], atol=1e-5)
    assert not np.allclose(dense[-1], sparse[-1], atol=1e-3)


def test_a_token_that_sees_kept_tokens_only_is_what_it_is_in_the_whole_prompt() -> None:
    """One layer with a window: the last tokens see nothing that was left out."""
    runner = Runner(Kind("gemma3_text", layers=1, more=GEMMA | {"sliding_window": 8}).native())
    dense, sparse = _run(runner, 1, TOKENS, None), _run(runner, 2, [TOKENS[k] for k in KEPT], KEPT)
    assert np.allclose(dense[-3:], sparse[-3:], atol=1e-4)
    assert not np.allclose(dense[-4], sparse[-4], atol=1e-3)


def test_pieces_of_a_sparse_prompt_are_the_whole(runner: Runner) -> None:
    tokens = [TOKENS[k] for k in KEPT]
    whole, pieces = _run(runner, 1, tokens, KEPT), _run(runner, 2, tokens, KEPT, pieces=3)
    assert np.allclose(whole, pieces, atol=1e-4)


@pytest.mark.parametrize("count", [1, 3])
def test_rows_go_on_at_their_own_positions(runner: Runner, count: int) -> None:
    """Runs of a sparse sequence beside a dense one, of one token or of several, come to what a prompt with
    the same tokens comes to."""
    sparse = [TOKENS[k] for k in KEPT]
    delta = len(TOKENS) - len(KEPT)
    more = [5, 9, 12]
    after = list(range(len(TOKENS), len(TOKENS) + len(more)))
    wanted = [
        _run(runner, 1, [*sparse, *more], [*KEPT, *after])[-3:],
        _run(runner, 2, [*TOKENS, *more], None)[-3:],
    ]
    _run(runner, 3, sparse, KEPT)
    _run(runner, 4, TOKENS, None)
    runner.fork(3, [5], shift=delta)
    runner.fork(4, [6])
    found: dict[int, list[Any]] = {5: [], 6: []}
    for k in range(0, len(more), count):
        tokens = mx.array(more[k : k + count] * 2, mx.int32)
        runs = [SequenceRun(number, count, count - 1) for number in found]
        logits = runner.run(tokens, runs, range(2 * count))
        assert logits is not None
        for row, number in enumerate(found):
            found[number].append(logits[row * count : (row + 1) * count])
    for row, number in enumerate(found):
        assert np.allclose(mx.concatenate(found[number]), wanted[row], atol=2e-4)
    for number in range(1, 7):
        runner.drop(number)


def test_what_a_token_looks_for_is_what_attention_uses(runner: Runner) -> None:
    """Queries come out of the pass that the token's logits come out of."""
    _run(runner, 1, TOKENS, None)
    plain = _run(runner, 2, [*TOKENS, 9], None)[-1]
    logits, asked = runner.peek(1, mx.array([9], mx.int32))
    assert np.allclose(np.array(logits[0]), plain, atol=1e-4)
    assert any(a is not None for a in asked)
    for layer, queries in enumerate(asked):
        if queries is not None:
            assert queries.dtype == mx.float32
            assert queries.shape[-1] == runner.keys(1, layer, len(TOKENS)).shape[-1]


def test_queries_of_both_kinds_of_kernels_agree() -> None:
    kind = Kind("qwen3")
    native, mlx = Runner(kind.native()), kind.in_float32()
    rotate(mlx)
    other = Runner(mlx)
    for one in (native, other):
        _run(one, 1, TOKENS, None)
    token = mx.array([9], mx.int32)
    for ours, theirs in zip(native.peek(1, token)[1], other.peek(1, token)[1], strict=True):
        assert ours is not None and theirs is not None
        assert np.allclose(ours, theirs, atol=1e-4)


ROPES: dict[str, Callable[[], Any]] = {
    "plain": lambda: nn.RoPE(16),
    "traditional": lambda: nn.RoPE(16, traditional=True),
    "partial": lambda: nn.RoPE(8),
    "scaled": lambda: nn.RoPE(16, scale=0.25),
    "llama3": lambda: rope_utils.initialize_rope(
        16, 10_000.0, False, {"rope_type": "llama3", "factor": 8.0}, 2048
    ),
    "yarn": lambda: rope_utils.initialize_rope(
        16, 10_000.0, False, {"rope_type": "yarn", "factor": 4.0}, 2048
    ),
}


@pytest.mark.parametrize("name", list(ROPES))
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_a_wrapped_rotation_is_bit_equal_and_keeps_its_type(name: str, dtype: mx.Dtype) -> None:
    rope, shared = ROPES[name](), Rotations()
    wrapped = Rotation(rope, shared, 0)
    x = mx.random.normal((1, 3, 12, 16)).astype(dtype)
    with shared.watched() as seen:
        turned = wrapped(x, offset=5)
    assert turned.dtype == dtype and mx.array_equal(turned, rope(x, offset=5))
    assert seen[0][0] is turned
    # As a pass has them: a token is a row, and its offset is where it stands.
    rows = x.transpose(2, 1, 0, 3)
    found = wrapped(rows, offset=mx.arange(5, 17, dtype=mx.int32))
    assert found.dtype == dtype
    assert mx.array_equal(found.transpose(2, 1, 0, 3), turned)


@pytest.mark.parametrize(
    "kind",
    ["llama4", "ministral3", "deepseek_v3", "glm4_moe_lite", "internlm2", "rwkv7", "qwen3_5"],
)
def test_kinds_that_nobody_has_looked_at_are_refused_by_name(kind: str) -> None:
    module = importlib.import_module(f"mlx_lm.models.{kind}")
    model = module.Model.__new__(module.Model)
    with pytest.raises(ModelError, match="SpecPrefill does not work with models of the kind"):
        rotate(model)


def test_a_rotation_that_depends_on_the_length_is_refused() -> None:
    model = tiny.build("llama", rope_scaling={"type": "dynamic", "factor": 2.0})
    with pytest.raises(ModelError, match="DynamicNTK"):
        rotate(model)


def test_a_model_that_cannot_be_run_is_left_alone() -> None:
    model = tiny.build("llama")
    ropes = [layer.self_attn.rope for layer in model.layers]
    model.model.norm = None
    with pytest.raises(TypeError):
        rotate(model)
    assert [layer.self_attn.rope for layer in model.layers] == ropes


def test_models_that_take_pictures_are_refused() -> None:
    with pytest.raises(ModelError, match="pictures"):
        rotate(SimpleNamespace(sees=True))


@pytest.mark.parametrize("kind", ["mamba2", "jamba"])
def test_models_that_cannot_are_refused_and_left_alone(kind: str) -> None:
    model = tiny.build(kind)
    with pytest.raises(ModelError, match="SpecPrefill"):
        rotate(model)
    assert not hasattr(model, "rotations")


def test_a_failure_leaves_nothing_watched() -> None:
    model = _rotated("llama")
    with pytest.raises(RuntimeError), model.rotations.watched():
        raise RuntimeError
    assert model.rotations.seen is None
    runner = Runner(model)
    runner.begin(1)
    _, asked = runner.peek(1, mx.array([4], mx.int32))
    assert all(a is not None for a in asked)
