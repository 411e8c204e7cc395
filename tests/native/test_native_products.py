"""Products with packed weights, against sums in double precision, in every format there is.

A sum of n floats, added up one after another, is wrong by at most n halves of the last place of what was
added; so is what is asserted. That a row's bits do not depend on the rows beside it is asserted as such.
"""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("llvmlite")

from kernel_calls import Array, Matrix, embed, laid_out, multiply, random_matrix

from millrace.native import library, stages
from millrace.native.formats import Format

ROWS = (1, 2, 3, 4, 5, 8, 9, 12, 13, 25, 64)
QUANTISED = [
    Format(codes, group, scales, True)
    for codes, group, scales in product(("u4", "u8"), (32, 64, 128), ("f16", "bf16", "f32"))
]
OTHERS = [
    *(Format(codes) for codes in ("f16", "bf16", "f32")),
    Format("u4", 32, "f16"),
    Format("u4", 64, "bf16"),
    Format("u8", 128, "f32"),
    *(Format(codes, 64, "f16", True) for codes in ("u2", "u3", "u5", "u6")),
    Format("u2", 16, "f16", zero=2),
    Format("u3", 32, "f16", zero=4),
    Format("u4", 16, "f32", zero=8),
    Format("u5", 32, "f16", zero=16),
    Format("u6", 16, "f32", zero=32),
    Format("u6", 16, "f16", True),
    Format("u8", 64, "bf16", zero=128),
    Format("u8", 128, "f32", zero=128),
]
HALF_A_PLACE = 2.0**-24


def error_allowed(matrix: Matrix, x: Array) -> Array:
    steps = matrix.form.group + 3 * matrix.groups + 16
    return steps * HALF_A_PLACE * (np.abs(x).astype(np.float64) @ matrix.magnitudes.T) + 1e-30


def check_product(matrix: Matrix, x: Array) -> None:
    outputs = len(matrix.values)
    true = x.astype(np.float64) @ matrix.values.T
    found = multiply(matrix, x)
    assert (np.abs(found[:, :outputs] - true) <= error_allowed(matrix, x)).all()
    assert not found[:, outputs:].any(), "padded outputs are 0"


@pytest.mark.parametrize("form", [*QUANTISED, *OTHERS], ids=lambda form: form.name)
def test_every_format_gives_the_product_whatever_the_rows(form: Format) -> None:
    rng = np.random.default_rng(len(form.name))
    matrix = random_matrix(form, 75, 4, rng)
    x = rng.normal(size=(max(ROWS), matrix.values.shape[1])).astype(np.float32)
    for rows in ROWS:
        check_product(matrix, x[:rows])


@pytest.mark.parametrize("form", [*QUANTISED, *OTHERS], ids=lambda form: form.name)
def test_a_row_gives_the_same_bits_whatever_the_rows_beside_it(form: Format) -> None:
    rng = np.random.default_rng(1)
    matrix = random_matrix(form, 64, 2, rng)
    x = rng.normal(size=(max(ROWS), matrix.values.shape[1])).astype(np.float32)
    alone = np.concatenate([multiply(matrix, row[None]) for row in x])
    for rows in ROWS:
        for first in {0, 64 - rows}:
            found = multiply(matrix, x[first : first + rows])
            assert found.tobytes() == alone[first : first + rows].tobytes()


@pytest.mark.parametrize("form", [*QUANTISED, *OTHERS], ids=lambda form: form.name)
def test_a_token_s_row_is_what_was_packed(form: Format) -> None:
    rng = np.random.default_rng(2)
    matrix = random_matrix(form, 83, 2, rng)
    tokens = np.concatenate([np.arange(83)[::-1], [0, 82, 0]])
    found = embed(matrix, tokens)
    true = matrix.values[tokens]
    assert (np.abs(found - true) <= HALF_A_PLACE * matrix.magnitudes[tokens] * 2).all()
    doubled = embed(matrix, tokens, 2.0)
    assert doubled.tobytes() == (2 * found).tobytes()


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("form", [QUANTISED[1], OTHERS[6], OTHERS[2]], ids=lambda form: form.name)
def test_outputs_start_with_what_they_are_told_to(form: Format, rows: int) -> None:
    rng = np.random.default_rng(3)
    matrix = random_matrix(form, 130, 2, rng)
    outputs, inputs = matrix.values.shape
    x = rng.normal(size=(rows, inputs)).astype(np.float32)
    there = rng.normal(size=(rows, outputs)).astype(np.float32)
    bias = rng.normal(size=outputs).astype(np.float32)
    true = x.astype(np.float64) @ matrix.values.T
    allowed = error_allowed(matrix, x) + (np.abs(there) + np.abs(bias)) * 1e-6
    for start, more in (
        (stages.KEEP, there),
        (stages.BIAS, bias[None]),
        (stages.KEEP_BIAS, there + bias),
    ):
        found = multiply(matrix, x, start=start, there=there, bias=bias)[:, :outputs]
        assert (np.abs(found - (true + more)) <= allowed).all()


def test_extreme_inputs_stay_in_their_own_row_and_output() -> None:
    rng = np.random.default_rng(4)
    matrix = random_matrix(QUANTISED[0], 64, 2, rng)
    x = rng.normal(size=(13, 64)).astype(np.float32)
    before = multiply(matrix, x)
    x[4, 7], x[9, 1], x[11, 0] = np.inf, np.nan, 3e38
    found = multiply(matrix, x)
    calm = [row for row in range(13) if row not in (4, 9, 11)]
    assert found[calm].tobytes() == before[calm].tobytes()
    assert not np.isfinite(found[[4, 9]]).any()


def test_denormal_weights_and_inputs_are_not_lost() -> None:
    """Where a processor flushes them, small scales of float16 would vanish: 2^-24 is the least."""
    form = Format("u8", 32, "f16", zero=128)
    rng = np.random.default_rng(5)
    matrix = random_matrix(form, 64, 1, rng)
    scales = np.full((64, 1), 2.0**-24, np.float32)
    codes = rng.integers(-128, 128, (64, 32))
    small = Matrix(
        form, laid_out(form, codes, scales, None), codes * 2.0**-24, np.abs(codes) * 2.0**-24, 1
    )
    assert small.data.shape == matrix.data.shape
    x = np.ones((1, 32), np.float32)
    assert np.array_equal(multiply(small, x)[0, :64], codes.sum(1) * np.float32(2.0**-24))
    x *= np.float32(1e-40)
    true = x.astype(np.float64) @ matrix.values.T
    assert np.abs(multiply(matrix, x)[0] - true[0]).max() <= 1e-42


@settings(max_examples=60)
@given(
    st.sampled_from([QUANTISED[0], QUANTISED[13], *OTHERS[:3], OTHERS[6], OTHERS[8]]),
    st.integers(1, 200),
    st.integers(1, 6),
    st.integers(1, 40),
    st.integers(0, 2**32 - 1),
)
def test_any_shape_gives_the_product(
    form: Format, outputs: int, groups: int, rows: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    if form.group == 16:
        groups *= 2  # whole sums of 32 inputs, as all rows of a model have
    matrix = random_matrix(form, outputs, groups, rng)
    x = rng.normal(size=(rows, matrix.values.shape[1])) * 10.0 ** rng.integers(-6, 6)
    check_product(matrix, x.astype(np.float32))


@given(st.integers(1, 10_000))
def test_rows_are_padded_to_what_there_are_kernels_for(rows: int) -> None:
    padded = library.padded_rows(rows)
    assert rows <= padded < rows + max(library.tile_shape()[0], 4)
    assert padded in library.streamed_rows() or padded % library.tile_shape()[0] == 0
