"""Logprobs against a plain forward pass of the same tokens."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from engine.harness import Bench
from tiny import SHAPES, build

from millrace.protocol import Choice, Sampling, Submit, TokenLogprob

A, B = range(100, 102)
"""Ids of requests."""


@pytest.fixture(scope="module", params=["llama", "gemma3_text", "qwen3_next"])
def model(request: pytest.FixtureRequest) -> Any:
    assert request.param in SHAPES
    return build(request.param)


def _table(model: Any, tokens: list[int]) -> np.ndarray:
    logits = model(mx.array([tokens], mx.int32))[0].astype(mx.float32)
    return np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))


def _check(items: list[TokenLogprob], tokens: list[int], table: np.ndarray, top: int) -> None:
    assert [i.token for i in items] == tokens
    for item, row in zip(items, table, strict=True):
        assert abs(item.logprob - row[item.token]) < 1e-4
        best = sorted(row, reverse=True)[:top]
        assert [v for _, v in item.top] == pytest.approx(best, abs=1e-4)
        assert all(abs(row[i] - v) < 1e-4 for i, v in item.top)


def test_generated_and_prompt_tokens(model: Any) -> None:
    prompts = [[3, 50, 7, 7, 90] * 60, [8, 1, 2]]
    submits = [
        Submit(
            i,
            p,
            [Choice(0, i)],
            12,
            Sampling(temperature=0.8, logit_bias={5: 2.0}, repetition_penalty=1.2),
            logprobs=(3, 0)[i],
            prompt_logprobs=(0, 2)[i],
        )
        for i, p in enumerate(prompts)
    ]
    bench = Bench(model, prefill_chunk=200)
    generated = bench.run(submits, turns=2)
    for i, prompt in enumerate(prompts):
        tokens = [*prompt, *generated[i, 0]]
        table = _table(model, tokens)
        first = len(prompt)
        _check(bench.prompt_logprobs[i], prompt[1:], table[: first - 1], (0, 2)[i])
        _check(bench.logprobs[i, 0], tokens[first:], table[first - 1 : -1], (3, 0)[i])


def test_rows_that_did_not_ask_get_none(model: Any) -> None:
    bench = Bench(model)
    bench.run([Submit(A, [1, 2], [Choice(0, 0)], 4), Submit(B, [1], [Choice(0, 0)], 4, logprobs=1)])
    assert bench.logprobs[A, 0] == []
    assert len(bench.logprobs[B, 0]) == 4
    assert bench.prompt_logprobs == {}
