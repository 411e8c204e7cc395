"""A draw that fails is its own row's: the others draw what they would have drawn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from engine.harness import Bench
from tiny import VOCAB, build

from millrace.engine.ahead import Ahead
from millrace.engine.row import Row
from millrace.engine.sampling import HostSampling
from millrace.protocol import Choice, Sampling, Submit


class _Touchy(HostSampling):
    """Raises where a row has the seed 13."""

    def choose(self, logits: mx.array, rows: Sequence[Row | Ahead]) -> mx.array:
        if any(row.seed == 13 for row in rows):
            raise ValueError("thirteen")
        return super().choose(logits, rows)


def _asked(id: int, seed: int) -> Submit:
    bias = {k: float(k % 5) for k in range(VOCAB)}
    sampling = Sampling(0.0, logit_bias=bias, repetition_penalty=1.3)
    return Submit(id, [3 + id, 7, 9], [Choice(0, seed)], 12, sampling)


def test_neighbours_of_a_failing_draw_are_not_changed() -> None:
    model: Any = build("llama")
    alone = {i: Bench(model).run([_asked(i, i)])[i, 0] for i in range(3)}
    bench = Bench(model, _Touchy())
    bench.run([*(_asked(i, i) for i in range(3)), _asked(9, 13)])
    assert {i: bench.generated[i, 0] for i in range(3)} == alone
    assert set(bench.failed) == {9}


def test_tokens_beyond_the_vocabulary_fail_their_own_request() -> None:
    model: Any = build("llama")
    bench = Bench(model, vocabulary=VOCAB, cache=1 << 24)
    wrong = [Submit(7, [VOCAB], [Choice(0, 0)], 4), Submit(8, [1, -1, 2], [Choice(0, 0)], 4)]
    bench.run([_asked(1, 1), *wrong])
    assert set(bench.failed) == {7, 8}
    assert bench.generated[1, 0] == Bench(model).run([_asked(1, 1)])[1, 0]
    assert bench.idle
