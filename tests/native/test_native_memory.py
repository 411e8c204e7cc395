"""Kernels know no bounds: what they touch is looked at here, and what would lead them astray is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

pytest.importorskip("llvmlite")

from native_models import VOCAB, Kind, plain_cache, random_tokens, run

from millrace.engine.memory import Rectangle
from millrace.engine.runner import Runner
from millrace.native import library

HERE = Path(__file__).parent


def test_no_kernel_leaves_its_memory() -> None:
    done = subprocess.run(
        [sys.executable, str(HERE / "guarded_run.py")],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    assert "no kernel left its memory" in done.stdout


@pytest.mark.parametrize("first", [10, 100, 150])
def test_padded_rows_have_room(first: int) -> None:
    """As many tokens as there is room for, where that is no whole number of tiles."""
    model = Kind().native()
    run(model, random_tokens(first))
    assert model._buffers is not None
    count = model._buffers.tokens
    run(model, random_tokens(count))
    assert model._buffers.tokens >= library.padded_rows(count)
    assert len(model._buffers.logits) >= library.padded_rows(count)


@pytest.mark.parametrize("width", [33, 47, 50])
def test_only_the_rows_next_places_are_written(width: int) -> None:
    model = Kind().native()
    runner = Runner(model)
    # Slots beyond the batch's rows, which nobody has yet.
    runner.reserve(Rectangle(4, width))
    for number, length in enumerate((width - 3, 5)):
        runner.begin(number, length)
        runner.chunk(number, random_tokens(length), length, beside=False, scored=False)
        runner.join(number, 1, length)
    before = []
    for layer in runner._batch:
        layer.keys[2:], layer.values[2:] = mx.nan, mx.nan
        before.append((np.array(layer.keys), np.array(layer.values)))
    runner.step(mx.array([[1, 2, 3], [4, 5, 6]], mx.int32))
    runner.advance([3, 3])
    for layer, old in zip(runner._batch, before, strict=True):
        for now, then in zip((np.array(layer.keys), np.array(layer.values)), old, strict=True):
            for row, at in enumerate((width - 3, 5)):
                assert (now[row, :, at : at + 3] != then[row, :, at : at + 3]).all()
                now[row, :, at : at + 3] = then[row, :, at : at + 3]
            assert now.tobytes() == then.tobytes()


@pytest.mark.parametrize("token", [VOCAB, VOCAB + 60, -1, 2**31 - 1, -(2**31)])
def test_tokens_outside_the_vocabulary_are_refused(token: int) -> None:
    model = Kind(layers=1).native()
    with pytest.raises(ValueError, match="Token ids"):
        model(mx.array([[1, token, 2]], mx.int32), plain_cache(model))
    assert np.isfinite(run(model, [1, VOCAB - 1, 2])).all()


def test_rows_without_room_for_their_tokens_are_refused() -> None:
    model = Kind(layers=1).native()
    runner = Runner(model)
    runner.reserve(Rectangle(1, 20))
    runner.begin(0, 18)
    runner.chunk(0, random_tokens(18), 18, beside=False, scored=False)
    runner.join(0, 1, 18)
    runner.step(mx.array([[1, 2]], mx.int32))
    with pytest.raises(ValueError, match="room"):
        runner.step(mx.array([[1, 2, 3]], mx.int32))
    with pytest.raises(ValueError, match="memory"):
        model(mx.array([[1], [2]], mx.int32), runner._batch)


def test_memory_of_a_cache_that_lies_apart_is_gathered_first() -> None:
    """What the prefix cache gives may be a view of a larger array."""
    model = Kind(layers=1).native()
    tokens = random_tokens(60)
    whole = run(model, tokens)
    cache = plain_cache(model)
    run(model, tokens[:40], cache)
    for layer in cache:
        wide = mx.concatenate([mx.zeros_like(layer.keys), layer.keys], axis=3)
        layer.keys = wide[..., 64:]
        layer.values = layer.values.swapaxes(1, 2).swapaxes(1, 2)
    assert run(model, tokens[40:], cache).tobytes() == whole[40:].tobytes()
