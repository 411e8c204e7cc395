"""Batched equals alone, token for token, for every kind of layer state and however rows come and go."""

from __future__ import annotations

import random
from typing import Any

import pytest
from engine.harness import Bench, greedy_alone
from tiny import SHAPES, VOCAB, build

from millrace.engine.sampling import DeviceSampling
from millrace.protocol import Abort, AbortChoice, Choice, Sampling, Submit

A, LATE = range(100, 102)
"""Ids of requests."""

GREEDY = Sampling(temperature=0.0)


@pytest.fixture(scope="module", params=list(SHAPES))
def model(request: pytest.FixtureRequest) -> Any:
    return build(request.param)


def _prompts(count: int, longest: int, seed: int) -> list[list[int]]:
    dice = random.Random(seed)
    return [
        [dice.randrange(VOCAB) for _ in range(dice.randrange(1, longest))] for _ in range(count)
    ]


def test_greedy_rows_equal_the_plain_loop(model: Any) -> None:
    prompts = _prompts(7, 50, seed=1)
    lengths = [5 + 7 * i for i in range(7)]
    bench = Bench(model, prefill_chunk=13, max_running=4)
    generated = bench.run(
        (
            Submit(i, p, [Choice(0, i)], n, GREEDY)
            for i, (p, n) in enumerate(zip(prompts, lengths, strict=True))
        ),
        turns=3,
    )
    for i, (prompt, n) in enumerate(zip(prompts, lengths, strict=True)):
        assert generated[i, 0] == greedy_alone(model, prompt, n)
        assert bench.finish[i, 0] == "length"


def test_sampled_rows_depend_on_their_own_seed_alone(model: Any) -> None:
    submits = [
        Submit(
            i,
            prompt,
            [Choice(0, i), Choice(1, 100 + i)],
            12,
            Sampling(0.4 + i / 4, (1.0, 0.9, 0.5)[i % 3], (0, 40, 5)[i % 3], (0.0, 0.05)[i % 2]),
        )
        for i, prompt in enumerate(_prompts(6, 30, seed=2))
    ]
    together = Bench(model, prefill_chunk=7).run(submits, turns=2)
    for submit in submits:
        alone = Bench(model).run([submit])
        assert alone == {k: v for k, v in together.items() if k[0] == submit.id}
        assert Bench(model, DeviceSampling()).run([submit]) == alone


def test_a_resume_goes_on_as_if_nothing_had_happened(model: Any) -> None:
    prompt = _prompts(1, 40, seed=3)[0]
    drawn = Sampling(temperature=1.0, top_p=0.95)
    undisturbed = Bench(model).run([Submit(A, prompt, [Choice(0, 5)], 20, drawn)])[A, 0]
    for cut in (1, 7, 19):
        resumed = Submit(A, prompt, [Choice(0, 5, undisturbed[:cut])], 20, drawn)
        assert Bench(model).run([resumed])[A, 0] == undisturbed[cut:]


def test_aborts_leave_the_others_untouched(model: Any) -> None:
    prompts = _prompts(4, 40, seed=4)
    bench = Bench(model, prefill_chunk=8)
    for i, prompt in enumerate(prompts):
        bench.put(Submit(i, prompt, [Choice(0, i), Choice(1, i)], 25, GREEDY), turns=4)
    bench.put(Abort(1), turns=1)
    bench.put(AbortChoice(2, 0), turns=1)
    bench.put(Submit(LATE, prompts[0], [Choice(0, 0)], 9, GREEDY))
    bench.put(Abort(LATE), turns=1)
    bench.drain()
    for id, choice in ((0, 0), (0, 1), (2, 1), (3, 0), (3, 1)):
        assert bench.generated[id, choice] == greedy_alone(model, prompts[id], 25)
    assert (1, 0) not in bench.finish
    assert (2, 0) not in bench.finish
    assert (LATE, 0) not in bench.finish


def test_a_stop_token_ends_the_row_and_is_reported(model: Any) -> None:
    prompt = _prompts(1, 20, seed=5)[0]
    free = greedy_alone(model, prompt, 30)
    stop = free[10]
    bench = Bench(model)
    generated = bench.run([Submit(A, prompt, [Choice(0, 0)], 30, GREEDY, [stop])])[A, 0]
    assert generated == free[: free.index(stop) + 1]
    assert bench.finish[A, 0] == "stop"
