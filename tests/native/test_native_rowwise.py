"""What is done to a row by itself, kernel by kernel, against numpy in double precision."""

from __future__ import annotations

import ctypes
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("llvmlite")

from kernel_calls import LANES, Array, Watched

from millrace.native import compile as compiling
from millrace.native import rowwise
from millrace.native.emit import Emitter, Value
from millrace.native.products import VECTOR

Kernels = dict[str, Callable[..., None]]


def exponential(e: Emitter, x: Value, out: Value, count: Value) -> None:
    loop = e.loop(count)
    at = e.times(loop.index, VECTOR)
    e.store(e.exp(e.load(e.at(x, at))), e.at(out, at))
    loop.close()


def whole_softmax(e: Emitter, x: Value, stats: Value) -> None:
    rowwise.whole_softmax(e, x, 8, stats)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernels]:
    bodies: list[Any] = [
        exponential, rowwise.norm, rowwise.sums, rowwise.copy, rowwise.divide, rowwise.rotate,
        rowwise.silu, rowwise.gelu, rowwise.softmax, whole_softmax, rowwise.merge, rowwise.transpose,
    ]  # fmt: skip
    place = tmp_path_factory.mktemp("compiled")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiling, "folder", lambda: place)
        code = compiling.compile_kernels("rowwise", {b.__name__: b for b in bodies})
    yield {body.__name__: _callable(code.address[body.__name__], body) for body in bodies}


def _callable(address: int, body: Any) -> Callable[..., None]:
    _, *names = inspect.signature(body).parameters
    kinds = [ctypes.c_float if n in compiling.FLOAT_ARGUMENTS else ctypes.c_int64 for n in names]
    function = ctypes.CFUNCTYPE(None, *kinds)(address)

    def run(*arguments: Any) -> None:
        function(*(a.at if isinstance(a, Watched) else a for a in arguments))

    return run


def row(values: Any) -> Watched:
    return Watched.of(np.asarray(values, np.float32)[None])


def exp(kernels: Kernels, values: Array) -> Array:
    padded = np.zeros(-(-len(values) // LANES) * LANES, np.float32)
    padded[: len(values)] = values
    x, out = row(padded), Watched(1, len(padded))
    kernels["exponential"](x, out, len(padded) // LANES)
    out.check()
    return out.rows[0, : len(values)].copy()


def test_exponentials_are_right_to_two_units_in_the_last_place(kernels: Kernels) -> None:
    x = np.concatenate([np.linspace(-87.33, 88, 200_001), np.linspace(-1e-3, 1e-3, 2001)])
    x = x.astype(np.float32)
    x = x[x >= np.float32(-87.33)]
    true = np.exp(x.astype(np.float64))
    places = np.spacing(true.astype(np.float32)).astype(np.float64)
    assert (np.abs(exp(kernels, x) - true) <= 2 * places).all()


def test_exponentials_of_what_is_no_common_number(kernels: Kernels) -> None:
    x = [0.0, -0.0, 1e-40, -1e-40, 1e-45, -87.34, -88, -104, -1e4, -3e38, -np.inf]
    found = exp(kernels, np.array(x, np.float32))
    assert found.tolist() == [1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0]
    large = exp(kernels, np.array([88.0, 88.7, 1e4, 3e38, np.inf], np.float32))
    # Beyond what a float holds it stays at the largest power it knows: finite, and no smaller.
    assert np.isfinite(large).all() and (large == large[0]).all() and large[0] > 1e38


def test_exponentials_grow(kernels: Kernels) -> None:
    x = np.sort(np.random.default_rng(0).uniform(-90, 89, 100_000)).astype(np.float32)
    found = exp(kernels, x)
    fell = found[:-1] - found[1:]
    assert (fell <= 2 * np.spacing(found[:-1])).all()


@pytest.mark.parametrize("count", [1, 2, 3, 36, 96])
@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_a_norm_divides_by_the_root_of_the_mean_square(
    kernels: Kernels, count: int, scale: float
) -> None:
    rng = np.random.default_rng(count)
    values = (rng.normal(size=count * LANES) * scale).astype(np.float32)
    weight = rng.normal(size=count * LANES).astype(np.float32)
    out = Watched(1, count * LANES)
    kernels["norm"](row(values), row(weight), out, count, 1e-5)
    true = values / np.sqrt(np.mean(values.astype(np.float64) ** 2) + np.float32(1e-5)) * weight
    np.testing.assert_allclose(out.rows[0], true, rtol=2e-6)
    out.check()
    # In place as well: heads are normed where they lie.
    mine = row(values)
    kernels["norm"](mine, row(weight), mine, count, 1e-5)
    assert mine.rows.tobytes() == out.rows.tobytes()


def test_the_norm_of_nothing_is_nothing(kernels: Kernels) -> None:
    out = Watched(1, 32)
    kernels["norm"](row(np.zeros(32)), row(np.ones(32)), out, 2, 1e-6)
    assert not out.rows.any()


@given(st.integers(1, 20), st.integers(0, 1000))
def test_sums_are_of_every_32_floats(kernels: Kernels, count: int, seed: int) -> None:
    values = np.random.default_rng(seed).normal(size=count * 32).astype(np.float32)
    out = Watched(1, count)
    kernels["sums"](row(values), out, count)
    parts = values.reshape(count, 32).astype(np.float64)
    assert (np.abs(out.rows[0] - parts.sum(1)) <= 6 * 2.0**-24 * np.abs(parts).sum(1)).all()
    out.check()


def test_copies_are_scaled_and_divided(kernels: Kernels) -> None:
    values = np.random.default_rng(1).normal(size=5 * LANES).astype(np.float32)
    out = Watched(1, 5 * LANES)
    kernels["copy"](row(values), out, 5, 0.125)
    assert out.rows[0].tobytes() == (values * np.float32(0.125)).tobytes()
    kernels["copy"](row(values), out, 5, 1.0)
    assert out.rows[0].tobytes() == values.tobytes()
    kernels["divide"](row(values), row([7.0]), out, 5)
    assert out.rows[0].tobytes() == (values / np.float32(7)).tobytes()
    out.check()


@pytest.mark.parametrize("half", [1, 2, 3, 4])
def test_pairs_are_turned(kernels: Kernels, half: int) -> None:
    rng = np.random.default_rng(half)
    values = rng.normal(size=2 * half * LANES).astype(np.float32)
    angles = rng.uniform(0, 7, half * LANES)
    cosines, sines = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    mine = row(values)
    kernels["rotate"](mine, row(cosines), row(sines), half)
    one, two = values.astype(np.float64).reshape(2, -1)
    true = np.concatenate([one * cosines - two * sines, two * cosines + one * sines])
    np.testing.assert_allclose(mine.rows[0], true, atol=1e-6)
    mine.check()


EDGES = [0.0, -0.0, 1e-40, -1e-40, 1e-20, 50, -50, 87, -87, 89, -89, 1e4, -1e4, 1e10, -1e10]


@pytest.mark.parametrize("name", ["silu", "gelu"])
def test_gates_open_as_they_should(kernels: Kernels, name: str) -> None:
    rng = np.random.default_rng(3)
    gate = np.concatenate([EDGES, np.linspace(-30, 30, 16 * LANES - len(EDGES))]).astype(np.float32)
    up = rng.normal(size=len(gate)).astype(np.float32)
    out = Watched(1, len(gate))
    kernels[name](row(gate), row(up), out, 16)
    x = gate.astype(np.float64)
    if name == "silu":
        true = x / (1 + np.exp(np.minimum(-x, 700)))
        allowed = 1e-6 * np.abs(true) + 1e-27
    else:
        true = 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
        allowed = 5e-7 * np.abs(x) + 1e-30
    assert (np.abs(out.rows[0] - true * up) <= allowed * np.maximum(np.abs(up), 1)).all()
    out.check()


@st.composite
def _seen(draw: st.DrawFn) -> tuple[int, int, int]:
    count = draw(st.integers(1, 8))
    low = draw(st.integers(0, count * LANES - 1))
    return count, low, draw(st.integers(low + 1, count * LANES))


@given(_seen(), st.integers(0, 1000), st.sampled_from([1e-3, 1.0, 30.0, 1000.0]))
def test_a_softmax_sees_what_lies_between_its_bounds(
    kernels: Kernels, seen: tuple[int, int, int], seed: int, scale: float
) -> None:
    count, low, high = seen
    values = np.random.default_rng(seed).normal(size=count * LANES).astype(np.float32)
    values *= np.float32(scale)
    # What lies outside is whatever was there before, which may be anything.
    outside = np.resize(np.array([np.nan, np.inf, -np.inf, 3e38], np.float32), count * LANES)
    values[:low], values[high:] = outside[:low], outside[high:]
    mine, stats = row(values), Watched(1, 2)
    kernels["softmax"](mine, count, low, high, stats)
    inside = values[low:high].astype(np.float64)
    powers = np.exp(inside - inside.max())
    assert not mine.rows[0, :low].any() and not mine.rows[0, high:].any()
    # The difference of two scores is rounded, and so is its power.
    allowed = 4e-7 + 2.0**-23 * np.abs(inside - inside.max())
    assert (np.abs(mine.rows[0, low:high] - powers) <= allowed * powers + 1e-37).all()
    assert stats.rows[0, 0] == inside.max()
    np.testing.assert_allclose(stats.rows[0, 1], powers.sum(), rtol=2e-4 if scale > 100 else 1e-5)
    mine.check()
    stats.check()


@given(st.integers(0, 1000), st.sampled_from([0.0, 1e-3, 1.0, 30.0, 1000.0, 1e37]))
def test_a_softmax_without_bounds_has_the_bits_of_one_whose_bounds_hide_nothing(
    kernels: Kernels, seed: int, scale: float
) -> None:
    values = np.random.default_rng(seed).normal(size=8 * LANES).astype(np.float32)
    values *= np.float32(scale)
    masked, whole = row(values), row(values)
    told, told_whole = Watched(1, 2), Watched(1, 2)
    kernels["softmax"](masked, 8, 0, 8 * LANES, told)
    kernels["whole_softmax"](whole, told_whole)
    assert masked.rows.tobytes() == whole.rows.tobytes()
    assert (told.rows == told_whole.rows).all()
    whole.check()
    told_whole.check()


def test_a_softmax_of_hidden_scores_gives_them_nothing(kernels: Kernels) -> None:
    values = np.full(LANES, -np.inf, np.float32)
    values[3] = 5.0
    mine, stats = row(values), Watched(1, 2)
    kernels["softmax"](mine, 1, 0, LANES, stats)
    assert mine.rows[0].tolist() == [0, 0, 0, 1] + [0] * 12
    assert stats.rows[0].tolist() == [5, 1]


@given(st.integers(1, 8), st.integers(0, 1000), st.sampled_from([0.0, 1.0, 60.0, 500.0]))
def test_merged_blocks_are_one_softmax(
    kernels: Kernels, count: int, seed: int, apart: float
) -> None:
    rng = np.random.default_rng(seed)
    parts = rng.normal(size=(2, count * LANES)).astype(np.float32)
    tops = np.array([rng.normal(), rng.normal() + apart], np.float32)
    if seed % 2:
        tops = tops[::-1].copy()
    sums = rng.uniform(1, 100, 2).astype(np.float32)
    out, stats = row(parts[0]), row([tops[0], sums[0]])
    kernels["merge"](out, stats, row(parts[1]), row([tops[1], sums[1]]), count)
    factors = np.exp(tops.astype(np.float64) - tops.max())
    np.testing.assert_allclose(out.rows[0], factors @ parts, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(stats.rows[0], [tops.max(), factors @ sums], rtol=1e-5)
    out.check()
    stats.check()


def test_merging_with_nothing_changes_no_bit(kernels: Kernels) -> None:
    values = np.random.default_rng(5).normal(size=64).astype(np.float32)
    nothing = [-np.inf, 0.0]
    out, stats = row(values), row([-3.5, 17.0])
    kernels["merge"](out, stats, row(np.zeros(64)), row(nothing), 4)
    assert out.rows[0].tobytes() == values.tobytes() and stats.rows[0].tolist() == [-3.5, 17]
    out, stats = row(np.zeros(64)), row(nothing)
    kernels["merge"](out, stats, row(values), row([-3.5, 17.0]), 4)
    assert out.rows[0].tobytes() == values.tobytes() and stats.rows[0].tolist() == [-3.5, 17]
    # A window may hide several blocks in a row from a query.
    out, stats = row(np.zeros(64)), row(nothing)
    kernels["merge"](out, stats, row(np.zeros(64)), row(nothing), 4)
    assert not out.rows.any() and stats.rows[0].tolist() == nothing


@pytest.mark.parametrize("count", [1, 2, 4, 6, 8])
def test_rows_become_columns(kernels: Kernels, count: int) -> None:
    values = np.random.default_rng(6).normal(size=(LANES, count * LANES)).astype(np.float32)
    x, out = Watched.of(values), Watched(count * LANES, LANES)
    kernels["transpose"](x, x.stride, out, out.stride, count)
    assert out.rows.tobytes() == values.T.tobytes()
    out.check()
