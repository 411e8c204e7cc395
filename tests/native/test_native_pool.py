"""Threads that share a program: one that is late takes nothing of a run that is not its own, and waits for
none; whatever their number, all units are done once."""

from __future__ import annotations

import ctypes
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("llvmlite")

from kernel_calls import random_matrix

from millrace.native import library, stages
from millrace.native.formats import Format
from millrace.native.linear import Products
from millrace.native.packing import PackedMatrix, aligned
from millrace.native.pool import Pool

_DRIVER = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 6)
UNITS, TAKEN, DONE, WAITS = (stages.HEAD.index(n) for n in ("units", "taken", "done", "waits"))


def late(program: np.ndarray, run: int) -> threading.Thread:
    """A thread that was sent to a run some time ago."""
    driver = _DRIVER(library.shared().address["driver"])
    give_way = ctypes.cast(ctypes.CDLL(None).sched_yield, ctypes.c_void_p).value
    at, size = program.ctypes.data, program.strides[0]
    thread = threading.Thread(
        target=driver, args=(at, len(program), size, run, 1, give_way), daemon=True
    )
    thread.start()
    return thread


def program_of(taken: int, run: int, units: int, done: int) -> np.ndarray:
    """Two stages whose function must not be called: it is nowhere."""
    program = aligned((2, 24), np.int64)
    program[:, UNITS], program[:, DONE], program[:, WAITS] = units, done, 1
    program[:, TAKEN] = (run << stages.RUN_BITS) + taken
    return program


def test_a_thread_that_waits_for_units_leaves_when_they_are_of_another_run() -> None:
    """The next run may have fewer units than the one it waits for."""
    program = program_of(taken=20, run=7, units=20, done=19)
    thread = late(program, 7)
    thread.join(0.05)
    assert thread.is_alive(), "a unit is not done"
    program[:, TAKEN] = (8 << stages.RUN_BITS) + 3
    program[:, UNITS] = program[:, DONE] = 3
    thread.join(60)
    assert not thread.is_alive()


def test_a_thread_takes_nothing_of_a_program_that_is_being_written_anew() -> None:
    program = program_of(taken=5, run=7, units=5, done=5)
    Pool(1).retire(program)
    program[:, UNITS] = 9
    thread = late(program, 7)
    thread.join(60)
    assert not thread.is_alive()
    assert (program[:, DONE] == 5).all()


@settings(max_examples=5)
@given(st.integers(0, 2**32 - 1), st.integers(1, 5))
def test_products_of_changing_sizes_are_right_on_any_number_of_threads(
    seed: int, threads: int
) -> None:
    rng = np.random.default_rng(seed)
    products = Products(threads)
    matrices = [random_matrix(Format("f32"), n, 2, rng) for n in (64, 1000, 130)]
    packed = [PackedMatrix(m.form, m.data, len(m.values), m.values.shape[1]) for m in matrices]
    for _ in range(60):
        which, rows = rng.integers(0, 3), rng.integers(1, 30)
        x = rng.normal(size=(rows, 64)).astype(np.float32)
        found = products.rows(packed[which], x)
        true = x.astype(np.float64) @ matrices[which].values.T
        np.testing.assert_allclose(found, true, atol=1e-4)
