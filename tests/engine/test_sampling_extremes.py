"""Logits and parameters at the edge: both backends always give a token of the vocabulary."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from engine.harness import Bench, greedy_alone
from tiny import VOCAB, build

from millrace.engine import sampling
from millrace.engine.logprobs import Logprobs
from millrace.engine.penalties import Penalties, stack
from millrace.engine.row import Row
from millrace.engine.sampler import Sampler
from millrace.engine.sampling import DeviceSampling, HostSampling
from millrace.protocol import Choice, Sampling, Submit

WIDTH = 50
PROMPT = [5, 9, 70, 3]
BACKENDS = [HostSampling, DeviceSampling]
FILTERS: list[dict[str, Any]] = [
    {},
    {"top_p": 0.5},
    {"top_p": 5e-324},
    {"typical_p": 0.5},
    {"typical_p": 1 - 1e-16},
    {"min_p": 0.5},
    {"min_p": 5e-324},
    {"top_k": 3},
    {"top_k": 2**62},
    {"xtc_probability": 1.0, "xtc_threshold": 0.0},
    {"top_k": 7, "top_p": 0.9, "min_p": 0.1, "typical_p": 0.9, "xtc_probability": 1.0},
]


def _row(stops: list[int] | None = None, **fields: Any) -> Row:
    request = Submit(1, [1], [Choice(0, 7)], 4, Sampling(**fields), stops or [])
    return Row.of(request, request.choices[0], 0.0)


def _logits(kind: str) -> np.ndarray:
    plain = np.random.default_rng(0).normal(0, 3, WIDTH).astype(np.float32)
    match kind:
        case "nothing":
            plain[:] = -np.inf
        case "one":
            plain[:], plain[31] = -np.inf, 2.0
        case "infinite":
            plain[17] = np.inf
        case "nan":
            plain[[3, 40]] = np.nan
        case "all nan":
            plain[:] = np.nan
        case "huge":
            plain[:] = np.float32(3e38)
        case "low":
            plain[:] = np.float32(-3e38)
        case "equal":
            plain[:] = 0.0
    return plain


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize(
    "kind", ["nothing", "one", "infinite", "nan", "all nan", "huge", "low", "equal", "plain"]
)
def test_whatever_the_logits_a_token_of_the_vocabulary_comes(
    backend: Any, filters: dict[str, Any], kind: str
) -> None:
    temperatures = (0.0, 5e-324, 1e-39, 1e-5, 1.0, 100.0)
    rows = [_row([0, 49], temperature=t, **filters) for t in temperatures]
    logits = mx.array(np.stack([_logits(kind)] * len(rows)))
    with np.errstate(all="raise", under="ignore"):
        tokens = backend().choose(logits, rows).tolist()
    assert all(0 <= t < WIDTH for t in tokens), tokens
    if kind == "one":
        assert tokens == [31] * len(rows)
    if kind == "infinite":
        assert tokens == [17] * len(rows)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_temperature_near_zero_is_greedy(backend: Any) -> None:
    logits = _logits("plain")
    rows = [_row(temperature=t, top_p=0.5) for t in (5e-324, 1e-39, 9e-6)]
    tokens = backend().choose(mx.array(np.stack([logits] * 3)), rows).tolist()
    assert tokens == [int(logits.argmax())] * 3


@pytest.mark.parametrize("backend", BACKENDS)
def test_xtc_with_no_threshold_leaves_what_a_grammar_allows(backend: Any) -> None:
    logits = np.full(WIDTH, -np.inf, np.float32)
    logits[[20, 21, 22]] = [3.0, 2.0, 1.0]
    row = _row(temperature=1.0, xtc_probability=1.0, xtc_threshold=0.0)
    assert backend().choose(mx.array(logits)[None], [row]).tolist() == [22]


@pytest.mark.parametrize("backend", BACKENDS)
def test_stop_tokens_outside_the_width_are_spared_by_nothing(backend: Any) -> None:
    odd = [-1, WIDTH, WIDTH + 7, 2**31, 2**62]
    row = _row(odd, temperature=1.0, xtc_probability=1.0, xtc_threshold=0.01)
    plain = _row([], temperature=1.0, xtc_probability=1.0, xtc_threshold=0.01)
    logits = mx.array(_logits("plain"))[None]
    assert backend().choose(logits, [row]).tolist() == backend().choose(logits, [plain]).tolist()


@pytest.mark.parametrize("seed", range(8))
def test_a_typical_share_that_rounding_cannot_reach_keeps_nearly_all(seed: int) -> None:
    weights = np.exp(np.random.default_rng(seed).normal(0, 2, 5000)).astype(np.float32)
    assert sampling.typical(weights, 1 - 1e-12).sum() > 0.9999 * weights.sum()


def test_penalties_of_ids_outside_the_width_touch_nothing() -> None:
    odd = {-1: 5.0, WIDTH: 5.0, 2**31: 5.0, 2**40: 5.0, 2**70: 5.0, 3: 1.0}
    settings = Sampling(logit_bias=odd, repetition_penalty=2.0, min_tokens=3)
    penalties = Penalties(settings, [1, WIDTH + 3], [2], [4, -1, WIDTH, 2**31, 2**63])
    ids, _, _ = stack([penalties.table()], WIDTH)
    assert set(ids[0].tolist()) == {1, 2, 3}
    assert penalties.banned(0, WIDTH).tolist() == [4]
    nothing = Penalties(Sampling(logit_bias={WIDTH: 1.0}), [], [], [])
    ids, factor, shift = stack([nothing.table(), penalties.table()], WIDTH)
    assert ((ids[0] == 0) & (factor[0] == 1.0) & (shift[0] == 0.0)).all()


class _Grammar:
    """Allows these tokens, as a mask that was computed before."""

    def __init__(self, *allowed: int) -> None:
        self.allowed = list(allowed)


def _drawn(monkeypatch: pytest.MonkeyPatch, backend: Any, rows: list[Row]) -> list[int]:
    def masked(logits: mx.array, grammars: list[tuple[int, Any]]) -> mx.array:
        for i, grammar in grammars:
            mask = mx.full(logits.shape[-1:], -mx.inf)
            mask[mx.array(grammar.allowed)] = 0.0
            logits[i] = logits[i] + mask
        return logits

    monkeypatch.setattr("millrace.engine.sampler.masked", masked)
    logits = mx.array(np.stack([_logits("plain")] * len(rows)))
    return list(Sampler(backend()).draw(logits, rows).tokens.tolist())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("filters", FILTERS)
def test_the_ban_on_stop_tokens_yields_where_nothing_else_may_come(
    monkeypatch: pytest.MonkeyPatch, backend: Any, filters: dict[str, Any]
) -> None:
    stuck = _row([20], min_tokens=5, temperature=1.0, **filters)
    stuck.grammar = _Grammar(20)  # type: ignore[assignment]
    two = _row([20, 21], min_tokens=5, temperature=1.0, **filters)
    two.grammar = _Grammar(20, 22)  # type: ignore[assignment]
    all_stop = _row(list(range(WIDTH)), min_tokens=5, temperature=1.0, **filters)
    best = int(_logits("plain").argmax())
    free = _row([best, WIDTH + 1, 2**40], min_tokens=5, temperature=0.0)
    drawn = _drawn(monkeypatch, backend, [stuck, two, all_stop, free])
    assert drawn[:2] == [20, 22]
    assert 0 <= drawn[2] < WIDTH
    assert drawn[3] not in (best, *range(WIDTH, WIDTH + 9))


def test_more_alternatives_than_tokens_are_all_of_them() -> None:
    found = Logprobs(mx.array(_logits("plain"))[None], mx.array([3]), 100).read([100])
    assert len(found[0].top) == WIDTH


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_hostile_row_changes_nothing_for_the_one_beside_it(backend: Any) -> None:
    model = build("llama")
    odd = [VOCAB, VOCAB + 5, 2**31 - 1, 2**40]
    settings = Sampling(temperature=1e-39, top_p=0.5, min_tokens=8, logit_bias={VOCAB + 9: 99.0})
    hostile = Submit(1, PROMPT, [Choice(0, 1)], 12, settings, odd)
    penalised = Sampling(temperature=1.0, repetition_penalty=1e-40, typical_p=0.5)
    worse = Submit(2, PROMPT, [Choice(0, 1)], 12, penalised, odd)
    greedy = Submit(3, PROMPT, [Choice(0, 1)], 12, Sampling(temperature=0.0))
    made = Bench(model, backend()).run([hostile, worse, greedy])
    assert made[3, 0] == greedy_alone(model, PROMPT, 12)
    assert all(0 <= t < VOCAB for t in made[1, 0] + made[2, 0])
