"""Kernels that do not give what plain operations give are not used, and no request notices."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
import tiny

from millrace.paging import kernels, plain
from millrace.paging.model import PagedModel
from millrace.paging.passes import PagePass, Run, run_pass
from millrace.paging.rule import AttentionRule
from millrace.paging.self_test import HeadShape, kernels_agree

SHAPES = [
    HeadShape(2, 4, 64, 64, mx.float32, 32),
    HeadShape(1, 4, 64, 32, mx.bfloat16, 16, window=20, sinks=True),
]


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Kernels of plain operations, whose results are off by what is put into the list."""
    off = [0.0]
    written: list[mx.array] = []

    def write(
        pool_keys: mx.array,
        pool_values: mx.array,
        keys: mx.array,
        values: mx.array,
        slots: mx.array,
        chain: mx.array,
    ) -> mx.array:
        written.clear()
        for pool, new in ((pool_keys, keys), (pool_values, values)):
            filled = mx.where(mx.isnan(pool), mx.zeros_like(pool), pool)
            filled[slots] = new[:, :, 0]
            written.append(filled)
        return chain + 1

    def attend(queries: mx.array, *rest: Any) -> tuple[mx.array, mx.array]:
        table, sequence, place, page, rule, chain = rest[2:]
        paged = [pool.reshape(-1, page, *pool.shape[1:]) for pool in written]
        found = [
            _one(queries[i, :, 0], paged, table[sequence[i].item()], int(place[i].item()), rule)
            for i in range(queries.shape[0])
        ]
        return mx.stack(found)[:, :, None] + off[0], chain

    monkeypatch.setattr(kernels, "write", write)
    monkeypatch.setattr(kernels, "attend", attend)
    return off


def _one(
    query: mx.array, paged: list[mx.array], table: mx.array, place: int, rule: AttentionRule
) -> mx.array:
    pages = [int(p) for p in table.tolist()]
    at: PagePass = run_pass(Run(0, place, 1), [[pages]], paged[0].shape[1])
    return plain.attend_run(query[None], *paged, at.groups[0], at.runs[0], rule)[0]


@pytest.mark.parametrize("shape", SHAPES, ids=["plain", "window and sinks"])
def test_right_kernels_are_used_and_wrong_ones_are_not(
    shape: HeadShape, stand_in: list[float]
) -> None:
    assert kernels_agree(shape)
    stand_in[0] = 0.5
    assert not kernels_agree(shape)
    stand_in[0] = float("nan")
    assert not kernels_agree(shape)


def test_kernels_that_cannot_be_compiled_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> mx.array:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(kernels, "write", refuse)
    assert not kernels_agree(SHAPES[0])


def test_layers_fall_back_to_plain_operations(stand_in: list[float]) -> None:
    wanted = {"head_dim": 64, "hidden_size": 128}
    assert all(
        layer.chain is not None
        for layer in PagedModel(tiny.build("llama", **wanted), page=32, kernels=True).paged
    )
    stand_in[0] = 1.0
    assert all(
        layer.chain is None
        for layer in PagedModel(tiny.build("llama", **wanted), page=32, kernels=True).paged
    )
