"""Kernels know no bounds: what they touch is looked at here, and what would lead them astray is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

pytest.importorskip("llvmlite")

from native_models import VOCAB, Kind, plain_cache, random_tokens, run
from native_pages import PagedSequences

from millrace.native import library
from millrace.native.attention import BLOCK
from millrace.native.items import NativeRun

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
    count = len(model._buffers.x)
    run(model, random_tokens(count))
    assert len(model._buffers.x) >= library.padded_rows(count)
    assert len(model._buffers.logits) >= library.padded_rows(count)


@pytest.mark.parametrize("length", [33, 127, 254])
def test_only_the_sequences_next_places_are_written(length: int) -> None:
    model = Kind().native()
    sequences = PagedSequences(model, 6)
    for number, count in enumerate((length, 5)):
        sequences.prefill(number, random_tokens(count))
    memory = [*sequences.pools.keys, *sequences.pools.values]
    before = [pool.copy() for pool in memory]
    sequences.run({0: [1, 2, 3], 1: [4, 5, 6]})
    for now, then in zip(memory, before, strict=True):
        for number, first in enumerate((length, 5)):
            for place in range(first, first + 3):
                at = sequences.tables[number].pages[place // BLOCK], slice(None), place % BLOCK
                assert np.isfinite(now[at]).all() and np.isnan(then[at]).all()
                then[at] = now[at]
        assert now.tobytes() == then.tobytes()


@pytest.mark.parametrize("token", [VOCAB, VOCAB + 60, -1, 2**31 - 1, -(2**31)])
def test_tokens_outside_the_vocabulary_are_refused(token: int) -> None:
    model = Kind(layers=1).native()
    with pytest.raises(ValueError, match="Token ids"):
        model(mx.array([[1, token, 2]], mx.int32), plain_cache(model))
    assert np.isfinite(run(model, [1, VOCAB - 1, 2])).all()


def test_what_would_lead_kernels_beyond_their_memory_is_refused() -> None:
    model = Kind(layers=1).native()
    pools = model.pools(4)
    run_two = partial(model.run_pages, [1, 2], [NativeRun(127, 2)], pools)
    run_two([[1, 2]], wanted=[1])
    with pytest.raises(ValueError, match="2 pages are needed"):
        run_two([[1]], wanted=[1])
    for page in (4, -1):
        with pytest.raises(ValueError, match="one of 4"):
            run_two([[1, page]], wanted=[1])
    for wanted in ([2], [-1], [0, 1, 1]):
        with pytest.raises(ValueError, match="wanted"):
            run_two([[1, 2]], wanted=wanted)
    for positions in ([1], [1, 2, 3], [3, -1]):
        with pytest.raises(ValueError, match="positions"):
            run_two([[1, 2]], wanted=[1], positions=positions)
    with pytest.raises(ValueError, match="adapters"):
        run_two([[1, 2]], wanted=[1], adapters=[1, 1])
    with pytest.raises(ValueError, match="looked at"):
        run_two([[1, 2]], wanted=[1], peek=True)
    with pytest.raises(ValueError, match="runs"):
        model.run_pages([1, 2, 3], [NativeRun(0, 2)], pools, [[1]], wanted=[1])
    with pytest.raises(ValueError, match="2 sequences"):
        model(mx.array([[1], [2]], mx.int32), model.make_cache())


@pytest.mark.parametrize("moves", [True, False])
def test_pools_that_are_resized_keep_their_pages(
    moves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the system can move a layer's memory, or it must be copied."""
    model = Kind().native()
    sequences = PagedSequences(model, 3)
    tokens = random_tokens(250)
    sequences.prefill(0, tokens[:200])
    pools = sequences.pools
    before = [pool[:3].copy() for pool in (*pools.keys, *pools.values)]
    # Memory that somebody looks at cannot be moved.
    seen = [] if moves else [*pools.keys, *pools.values]
    for size in (4, 700, 5):
        pools.resize(size)
        assert len(pools) == size and len(pools.values[-1]) == size
        for pool, old in zip((*pools.keys, *pools.values), before, strict=True):
            assert pool[:3].tobytes() == old.tobytes()
            assert not pool[3:].any()
    found = sequences.run({0: tokens[200:]})[0]
    assert found.tobytes() == run(model, tokens)[200:].tobytes()
    assert all(old.shape[0] == 3 for old in seen)


def test_pools_that_grow_are_not_held_twice() -> None:
    """Nor do pages that nobody has written to take room."""
    done = subprocess.run(
        [sys.executable, str(HERE / "growing_pools.py")],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr


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
