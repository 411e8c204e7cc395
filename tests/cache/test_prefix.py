"""Cached equals cold: what is found in the prefix cache changes nothing but the work."""

from __future__ import annotations

import random
from typing import Any

import pytest
from engine.harness import Bench, cost, greedy_alone
from engine.preempted import Witness
from tiny import SHAPES, VOCAB, build

from millrace.cache.state import Layout
from millrace.engine.memory import Budget
from millrace.protocol import Abort, Choice, Sampling, Submit

A, AGAIN, B, COLD, FIRST, GONE, HEAD = range(100, 107)
"""Ids of requests."""

PLENTY = 1 << 28
GREEDY = Sampling(temperature=0.0)


@pytest.fixture(scope="module", params=list(SHAPES))
def model(request: pytest.FixtureRequest) -> Any:
    return build(request.param)


@pytest.fixture(scope="module")
def llama() -> Any:
    return build("llama")


def _tokens(source: random.Random, count: int) -> list[int]:
    return [source.randrange(1, VOCAB) for _ in range(count)]


def _ask(id: int, prompt: list[int], count: int = 6, **more: Any) -> Submit:
    return Submit(id, prompt, [Choice(0, 1)], count, GREEDY, **more)


def _turns(source: random.Random, bench: Bench, first: int, turns: int) -> list[int]:
    """A conversation: each turn's prompt is the last prompt, its answer and something new."""
    prompt = _tokens(source, source.randrange(5, 50))
    for id in range(first, first + turns):
        generated = bench.run([_ask(id, prompt, logprobs=0)])[id, 0]
        scores = [s.logprob for s in bench.logprobs[id, 0]]
        cold = Bench(bench.model)
        assert generated == cold.run([_ask(COLD, prompt, logprobs=0)])[COLD, 0]
        plain = [s.logprob for s in cold.logprobs[COLD, 0]]
        assert scores == pytest.approx(plain, abs=1e-4)
        prompt = [*prompt, *generated, *_tokens(source, source.randrange(1, 30))]
    return prompt


def test_conversations_equal_cold_runs(model: Any) -> None:
    source = random.Random(5)
    bench = Bench(model, cache=PLENTY, prefill_chunk=16, checkpoint_every=32)
    for first in (0, 10):
        _turns(source, bench, first, 4)
        assert bench.cache is not None
        bench.cache.check()
    # From the second turn on, at most the new tokens and the answer's last are run.
    last = bench.found[13]
    assert last.cached >= bench.found[12].total


def test_the_same_prompt_again_runs_its_last_token_only(model: Any) -> None:
    prompt = _tokens(random.Random(1), 70)
    bench = Bench(model, cache=PLENTY, prefill_chunk=16)
    first = bench.run([_ask(FIRST, prompt)])[FIRST, 0]
    assert bench.found[FIRST].hit == "none"
    assert bench.found[FIRST].written == 69
    again = bench.run([_ask(AGAIN, prompt)])[AGAIN, 0]
    assert first == again
    assert (bench.found[AGAIN].cached, bench.found[AGAIN].hit) == (69, "exact")


def test_prompts_that_part_share_what_they_have_in_common(model: Any) -> None:
    source = random.Random(2)
    head = _tokens(source, 60)
    bench = Bench(model, cache=PLENTY, prefill_chunk=16, checkpoint_every=20)
    for i in range(4):
        prompt = [*head, *_tokens(source, 9)]
        generated = bench.run([_ask(i, prompt, boundaries=[60])])[i, 0]
        assert generated == greedy_alone(model, prompt, 6)
        if i:
            assert bench.found[i].cached >= 60
    assert bench.cache is not None
    bench.cache.check()


def test_rows_that_come_and_go_beside_cached_ones(model: Any) -> None:
    source = random.Random(3)
    bench = Bench(model, cache=PLENTY, prefill_chunk=16, checkpoint_every=32, max_running=4)
    heads = [_tokens(source, 40) for _ in range(2)]
    prompts = {i: [*source.choice(heads), *_tokens(source, 1 + i)] for i in range(12)}
    for id, prompt in prompts.items():
        bench.put(_ask(id, prompt, 4 + id), source.randrange(4))
    bench.engine.turn()
    bench.drain()
    for id, prompt in prompts.items():
        assert bench.generated[id, 0] == greedy_alone(model, prompt, 4 + id)


def test_an_aborted_prompt_is_not_lost(model: Any) -> None:
    prompt = _tokens(random.Random(4), 200)
    bench = Bench(model, cache=PLENTY, prefill_chunk=16)
    bench.put(_ask(GONE, prompt), 6)
    bench.put(Abort(GONE), 1)
    bench.drain()
    done = bench.prefilled[GONE]
    assert 0 < done < 199
    generated = bench.run([_ask(AGAIN, prompt)])[AGAIN, 0]
    assert bench.found[AGAIN].cached >= done
    assert generated == greedy_alone(model, prompt, 6)


def test_salts_share_nothing(llama: Any) -> None:
    prompt = _tokens(random.Random(6), 30)
    bench = Bench(llama, cache=PLENTY)
    bench.run([_ask(A, prompt, cache_salt="a")])
    bench.run([_ask(B, prompt, cache_salt="b")])
    bench.run([_ask(AGAIN, prompt, cache_salt="a")])
    assert [bench.found[i].cached for i in (A, B, AGAIN)] == [0, 0, 29]


def test_a_shared_prefix_is_held_once(llama: Any) -> None:
    source = random.Random(7)
    head = _tokens(source, 500)
    bench = Bench(llama, cache=PLENTY)
    bench.run([_ask(HEAD, head, 1)])
    assert bench.cache is not None
    one = bench.cache.nbytes
    bench.run([_ask(i, [*head, 1 + i], 1) for i in range(32)])
    # Whoever goes on from a partly filled page has a copy of it.
    parted = 32 * bench.cache.sizes.segment(0, 1)
    assert bench.cache.nbytes <= 1.1 * one + parted
    assert all(bench.found[i].cached >= 499 for i in range(32))


def test_prompts_that_arrive_together_compute_what_they_share_once(llama: Any) -> None:
    source = random.Random(8)
    head = _tokens(source, 100)
    bench = Bench(llama, cache=PLENTY, prefill_chunk=512)
    bench.run([_ask(i, [*head, 1 + i, *_tokens(source, 5)]) for i in range(4)])
    assert sorted(bench.found[i].cached for i in range(4)) == [0, 100, 100, 100]


def test_memory_stays_within_its_budget(model: Any) -> None:
    source = random.Random(9)
    bench = Bench(model, cache=60_000, prefill_chunk=16, checkpoint_every=32)
    head = _tokens(source, 30)
    for i in range(30):
        prompt = [*head, *_tokens(source, source.randrange(1, 120))]
        generated = bench.run([_ask(i, prompt, 3)])[i, 0]
        assert generated == greedy_alone(model, prompt, 3)
        assert bench.cache is not None
        bench.cache.check()


def test_a_row_that_gave_way_finds_its_state(llama: Any) -> None:
    source = random.Random(10)
    price = cost(llama)
    budget = Budget(price, 2 * price.row(512))
    bench = Witness(llama, budget=budget, cache=PLENTY)
    prompts = {i: _tokens(source, 200) for i in range(3)}
    bench.run([_ask(id, p, 400, priority=-id) for id, p in prompts.items()])
    for id, prompt in prompts.items():
        assert bench.generated[id, 0] == greedy_alone(llama, prompt, 400)
    assert bench.again and 0 not in bench.again, "the least important give way"
    assert all(part.cached >= 200 for part in bench.again.values())


def test_eight_bits_at_rest_restore_nearly_the_same(model: Any) -> None:
    if not Layout.of(model).cuttable:
        pytest.skip("nothing to pack")
    prompt = _tokens(random.Random(11), 60)
    bench = Bench(model, cache=PLENTY, cache_quant=True)
    bench.run([_ask(FIRST, prompt, logprobs=0)])
    bench.run([_ask(AGAIN, prompt, logprobs=0)])
    assert bench.found[AGAIN].cached == 59
    first, again = (bench.logprobs[i, 0][0].logprob for i in (FIRST, AGAIN))
    assert again == pytest.approx(first, abs=0.2)
