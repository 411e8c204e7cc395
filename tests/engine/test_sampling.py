"""Every parameter does what it says, to its own row only."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from engine.harness import Bench, greedy_alone
from tiny import VOCAB, build

from millrace.engine import sampling as filters
from millrace.engine.row import Row
from millrace.engine.sampling import DeviceSampling
from millrace.protocol import Choice, Sampling, Submit

A, B, C = range(100, 103)
"""Ids of requests."""

PROMPT = [5, 9, 70, 3, 9, 44, 9]


@pytest.fixture(scope="module")
def model() -> Any:
    return build("llama")


def _one(model: Any, sampling: Sampling, count: int = 24, **more: Any) -> list[int]:
    submit = Submit(A, PROMPT, [Choice(0, 7)], count, sampling, **more)
    return Bench(model).run([submit])[A, 0]


SIXTEEN = [
    Sampling(temperature=0.0),
    Sampling(temperature=0.7),
    Sampling(temperature=1.3, top_p=0.8),
    Sampling(temperature=1.0, top_k=1),
    Sampling(temperature=1.0, top_k=5),
    Sampling(temperature=1.0, min_p=0.1),
    Sampling(temperature=1.0, typical_p=0.6),
    Sampling(temperature=1.0, xtc_probability=0.5, xtc_threshold=0.05),
    Sampling(temperature=0.0, repetition_penalty=1.4),
    Sampling(temperature=0.0, presence_penalty=1.5),
    Sampling(temperature=0.0, frequency_penalty=0.8),
    Sampling(temperature=0.0, logit_bias={3: 4.0, 9: -100.0}),
    Sampling(temperature=1.0, logit_bias={17: 3.0}, min_tokens=9),
    Sampling(temperature=0.9, top_p=0.9, top_k=20, min_p=0.02, frequency_penalty=0.3),
    Sampling(temperature=2.0, typical_p=0.9, xtc_probability=1.0),
    Sampling(temperature=0.0, min_tokens=12, repetition_penalty=1.1),
]


def test_sixteen_parameter_sets_at_once_each_as_alone(model: Any) -> None:
    submits = [
        Submit(i, PROMPT[: 2 + i % 6], [Choice(0, 100 + i)], 20, s, [1, 2, 60], logprobs=i % 3)
        for i, s in enumerate(SIXTEEN)
    ]
    together = dict(Bench(model, prefill_chunk=4).run(submits, turns=1))
    for submit in submits:
        alone = Bench(model).run([submit])[submit.id, 0]
        assert alone == together[submit.id, 0], submit.sampling
        on_device = Bench(model, DeviceSampling()).run([submit])[submit.id, 0]
        assert on_device == alone, submit.sampling


def test_top_k_one_is_greedy_at_any_temperature(model: Any) -> None:
    assert _one(model, Sampling(temperature=3.0, top_k=1)) == greedy_alone(model, PROMPT, 24)


def test_a_bias_forbids_and_forces(model: Any) -> None:
    free = _one(model, Sampling(temperature=0.0))
    assert free[0] not in _one(model, Sampling(temperature=0.0, logit_bias={free[0]: -1000.0}))
    assert _one(model, Sampling(temperature=1.0, logit_bias={42: 1000.0})) == [42] * 24


def test_a_strong_presence_penalty_never_repeats(model: Any) -> None:
    generated = _one(model, Sampling(temperature=0.0, presence_penalty=1000.0), 60)
    assert len(set(generated)) == 60


def test_frequency_grows_with_every_use(model: Any) -> None:
    biased = {4: 50.0, 8: 49.0}
    generated = _one(model, Sampling(temperature=0.0, frequency_penalty=2.0, logit_bias=biased), 10)
    assert set(generated) == {4, 8}
    assert abs(generated.count(4) - generated.count(8)) <= 2


def test_repetition_looks_at_the_whole_context(model: Any) -> None:
    prompt = [77] + [6] * 400
    submit = Submit(
        A,
        prompt,
        [Choice(0, 0)],
        1,
        Sampling(temperature=0.0, repetition_penalty=1e6, logit_bias={77: 50.0}),
    )
    alone = Submit(B, prompt, [Choice(0, 0)], 1, Sampling(temperature=0.0, logit_bias={77: 50.0}))
    assert Bench(model).run([alone])[B, 0] == [77]
    # The bias is added after the division, so what is left of the logit is the bias alone.
    plain = Bench(model).run([submit])[A, 0]
    assert plain == [77]
    far = Sampling(temperature=0.0, repetition_penalty=1e6)
    raw = model(mx.array([prompt], mx.int32))[0, -1]
    generated = Bench(model).run([Submit(C, prompt, [Choice(0, 0)], 1, far)])[C, 0][0]
    unseen = [i for i in range(VOCAB) if i not in set(prompt)]
    best = max(unseen, key=lambda i: float(raw[i]))
    assert generated == best


def test_no_stop_before_min_tokens(model: Any) -> None:
    stops = list(range(VOCAB // 2))
    early = _one(model, Sampling(temperature=1.0), stop_ids=stops)
    late = _one(model, Sampling(temperature=1.0, min_tokens=15), stop_ids=stops)
    assert len(early) < 15 <= len(late)
    assert not set(late[:15]) & set(stops)


def test_xtc_takes_the_top_choices_away() -> None:
    weights = np.array([0.4, 0.3, 0.2, 0.06, 0.04], np.float32)
    wanted = pytest.approx([0.4, 0.0, 0.2, 0.06, 0.04])
    kept = filters.without_top_choices(weights, 0.1, np.array([0]))
    assert kept.tolist() == wanted, "0 ends the row and stays"
    request = Submit(A, [1], [Choice(0, 0)], 4, Sampling(xtc_threshold=0.1), [0])
    row = Row.of(request, request.choices[0], 0.0)
    assert np.array(filters._xtc(mx.array(weights)[None], row))[0].tolist() == wanted


def test_typical_keeps_what_is_as_surprising_as_expected() -> None:
    weights = np.array([1.0, 0.2, 0.2, 0.2, 0.2, 0.2, 0.2, 0.001], np.float32)
    wanted = [False, True, True, True, True, True, True, False]
    assert (filters.typical(weights, 0.5) > 0).tolist() == wanted
    assert (np.array(filters._typical(mx.array(weights)[None], 0.5))[0] > 0).tolist() == wanted


def test_draws_follow_the_distribution(model: Any) -> None:
    logits = np.array(model(mx.array([PROMPT], mx.int32))[0, -1]).astype(np.float64)
    p = np.exp(logits - logits.max())
    p /= p.sum()
    submits = [
        Submit(i, PROMPT, [Choice(k, 1000 * i + k) for k in range(100)], 1, Sampling())
        for i in range(20)
    ]
    generated = Bench(model, max_running=200).run(submits)
    seen = np.bincount([t[0] for t in generated.values()], minlength=VOCAB) / 2000
    assert np.abs(seen - p).sum() < 0.25
    assert np.abs(seen - p).max() < 0.04
