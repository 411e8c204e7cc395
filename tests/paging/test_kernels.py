"""The GPU kernels, lane by lane, against plain attention: shuffled tables, free pages full of NaN."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from paging.lanes import interpret

from millrace.paging import kernel_text as text
from millrace.paging import kernels, plain
from millrace.paging.passes import Run, flat_pass
from millrace.paging.rule import AttentionRule

BACKENDS = ["cuda", "metal"]


@dataclass
class Case:
    heads: int
    shared: int
    size: int
    value_size: int
    page: int
    window: int | None = None
    sinks: bool = False
    splits: int = 1

    def __str__(self) -> str:
        more = f"-w{self.window}" * bool(self.window) + "-sinks" * self.sinks
        return f"{self.heads}x{self.shared}x{self.size}-p{self.page}-s{self.splits}{more}"


CASES = [
    Case(2, 2, 64, 64, 16),
    Case(1, 4, 128, 128, 4, splits=4),
    Case(2, 1, 64, 32, 8, window=9, sinks=True),
    Case(1, 2, 256, 256, 16, window=40, splits=2),
    Case(1, 8, 96, 96, 16, sinks=True, splits=2),
    Case(1, 7, 80, 80, 16),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention_over_pages(case: Case, backend: str, tmp_path: Path) -> None:
    draw = random.Random(5)
    numbers = np.random.default_rng(5)
    lengths = [1, 30, 57, case.page]
    runs = [Run(i, n - k, k) for i, (n, k) in enumerate(zip(lengths, (1, 3, 1, 1), strict=True))]
    pages = list(range(1, 40))
    draw.shuffle(pages)
    tables = [[pages.pop() for _ in range(-(-n // case.page))] for n in lengths]
    at = flat_pass(runs, [tables], case.page, tokens=8)
    slots = 40 * case.page
    pool_keys = np.full((slots, case.heads, case.size), np.nan, np.float32)
    pool_values = np.full((slots, case.heads, case.value_size), np.nan, np.float32)
    pool_keys[: case.page] = pool_values[: case.page] = 0
    for table, length in zip(tables, lengths, strict=True):
        for n in range(length):
            slot = table[n // case.page] * case.page + n % case.page
            pool_keys[slot] = numbers.normal(size=pool_keys.shape[1:])
            pool_values[slot] = numbers.normal(size=pool_values.shape[1:])
    queries = numbers.normal(size=(8, case.heads * case.shared, case.size)).astype(np.float32)
    sinks = numbers.normal(size=case.heads * case.shared).astype(np.float32)
    rule = AttentionRule(case.size**-0.5, case.window, mx.array(sinks) if case.sinks else None)

    want = _plain(queries, pool_keys, pool_values, at, rule, case)
    found = _interpreted(backend, queries, pool_keys, pool_values, at, rule, sinks, case, tmp_path)
    count = at.tokens - at.padding
    assert np.abs(found[:count] - want[:count]).max() < 1e-4


def _plain(queries, pool_keys, pool_values, at, rule, case):  # type: ignore[no-untyped-def]
    keys, values = (
        mx.array(pool).reshape(-1, case.page, *pool.shape[1:]) for pool in (pool_keys, pool_values)
    )
    return np.array(plain.attend(mx.array(queries), keys, values, at, at.groups[0], rule))


def _interpreted(  # type: ignore[no-untyped-def]
    backend, queries, pool_keys, pool_values, at, rule, sinks, case, folder
):
    heads = case.heads * case.shared
    together = kernels._heads_together(case.shared, max(case.size, case.value_size))
    template = {
        "HK": case.heads,
        "G": case.shared,
        "GB": together,
        "D": case.size,
        "DV": case.value_size,
        "PAGE": case.page,
        "WINDOW": case.window or 0,
        "WARPS": kernels.WARPS,
        "SINKS": int(case.sinks),
        "SPLIT": int(case.splits > 1),
    }
    group = at.groups[0]
    inputs = dict(
        zip(
            kernels._ATTEND_INPUTS,
            [
                queries[:, :, None],
                pool_keys,
                pool_values,
                np.array(group.table),
                np.array(at.sequences),
                np.array(at.places),
                np.array(rule.numbers),
                sinks,
                np.zeros(1, np.int32),
            ],
            strict=True,
        )
    )
    shape = (at.tokens * heads, case.splits)
    outputs = {
        "out": np.zeros((at.tokens, heads, case.value_size), np.float32),
        "parts": np.zeros((*shape, case.value_size), np.float32),
        "bounds": np.zeros((*shape, 2), np.float32),
        "next": np.zeros(1, np.int32),
    }
    blocks = (at.tokens, heads // together, case.splits)
    lanes = kernels.WARPS * 32
    interpret(backend, text.ATTEND, inputs, outputs, template, blocks, lanes, folder)
    if case.splits == 1:
        return outputs["out"]
    parts = {"parts": outputs["parts"], "bounds": outputs["bounds"]}
    combined = {"out": outputs["out"]}
    template = {"DV": case.value_size}
    blocks = (at.tokens * heads, 1, 1)
    interpret(backend, text.COMBINE, parts, combined, template, blocks, 32, folder)
    return outputs["out"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_keys_and_values_are_written_to_their_slots(backend: str, tmp_path: Path) -> None:
    numbers = np.random.default_rng(2)
    pools = [np.zeros((40, 2, size), np.float32) for size in (64, 40)]
    # Two rows of three tokens, columns before heads in memory.
    rows = [
        numbers.normal(size=(2, 3, 2, size)).astype(np.float32).transpose(0, 2, 1, 3)
        for size in (64, 40)
    ]
    slots = np.array([3, 39, 0, 17, 8, 21], np.int32)
    chain, done = np.array([6], np.int32), np.zeros(1, np.int32)
    inputs = {
        "pool_keys": pools[0],
        "pool_values": pools[1],
        "keys": rows[0],
        "values": rows[1],
        "slots": slots,
        "chain": chain,
    }
    template = {"HK": 2, "D": 64, "DV": 40}
    interpret(backend, text.WRITE, inputs, {"done": done}, template, (6, 2, 1), 32, tmp_path)
    for pool, row in zip(pools, rows, strict=True):
        assert (pool[slots] == row.transpose(0, 2, 1, 3).reshape(6, 2, -1)).all()
        assert not pool[[i for i in range(40) if i not in slots]].any()
    assert done[0] == 7


def test_keys_are_split_where_there_are_few_blocks() -> None:
    assert kernels.splits_for(8, 8192) == 32
    assert kernels.splits_for(8, 300) == 2
    assert kernels.splits_for(64 * 8, 8192) == 1
    assert kernels.splits_for(1, 16) == 1
