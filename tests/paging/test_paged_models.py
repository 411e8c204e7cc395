"""Every kind of layer state on pages gives the tokens that mlx-lm's own caches give."""

from __future__ import annotations

import random

import mlx.core as mx
import pytest
import tiny
from paging.own_kinds import OWN_KINDS
from paging.paged_world import PagedWorld, alone

from millrace.paging.model import Batching
from millrace.paging.seam import SEAM

LENGTH = 12
BATCHING = {
    "llama": Batching.FLAT,
    "qwen3": Batching.FLAT,
    "gemma3_text": Batching.FLAT,
    "gpt_oss": Batching.FLAT,
    "gemma4_text": Batching.FLAT,
    "cohere2": Batching.FLAT,
    "olmo3": Batching.FLAT,
    "mamba2": Batching.ROWS,
    "jamba": Batching.ROWS,
    "qwen3_next": Batching.ROWS,
    "deepseek_v3": Batching.ROWS,
    "deepseek_v32": Batching.ROWS,
    "falcon_h1": Batching.ROWS,
    "recurrent_gemma": Batching.ROWS,
    "baichuan_m1": Batching.ROWS,
    "lfm2": Batching.ROWS,
    # Its mask for rows has one axis too few where heads share keys, in mlx-lm's own batches too.
    "gemma2": Batching.SINGLE,
    # Its chunks are counted from one start for all rows.
    "llama4": Batching.SINGLE,
    # Some layers have no keys of their own and use those of others.
    "gemma3n": Batching.FLAT,
    # Such layers find their place by how many keys there are, which pages round up.
    "afm7": Batching.SINGLE,
}


@pytest.mark.parametrize("kind", BATCHING)
def test_sequences_on_pages_are_what_they_are_alone(kind: str) -> None:
    model = tiny.build(kind, **OWN_KINDS.get(kind, {}))
    draw = random.Random(3)
    prompts = [[draw.randrange(tiny.VOCAB) for _ in range(n)] for n in (5, 23, 1, 40, 17)]
    want = [alone(model, prompt, LENGTH) for prompt in prompts]
    world = PagedWorld(model)
    assert world.model.batching is BATCHING[kind]
    waiting = list(prompts)
    answers = []
    while waiting or world.running:
        if waiting:
            answers.append(world.begin(waiting.pop(0), LENGTH))
        world.step()
    for answer, (made, logits) in zip(answers, want, strict=True):
        assert answer.made == made
        assert mx.abs(mx.stack(answer.logits) - logits).max().item() < 1e-3
    assert all(pool.used == 0 for pool in world.pools)


@pytest.mark.parametrize("kind", BATCHING)
def test_pages_are_taken_again_while_others_run(kind: str) -> None:
    """Few pages, many sequences: what one has left behind is never read by the next."""
    model = tiny.build(kind, **OWN_KINDS.get(kind, {}))
    draw = random.Random(7)
    world = PagedWorld(model, pages=64)
    prompts = [
        [draw.randrange(tiny.VOCAB) for _ in range(draw.randrange(1, 30))] for _ in range(16)
    ]
    lengths = [draw.randrange(1, 12) for _ in prompts]
    waiting = list(zip(prompts, lengths, strict=True))
    answers = []
    while waiting or world.running:
        while waiting and len(world.running) < 4:
            answers.append(world.begin(*waiting.pop(0)))
        world.step(chunk=draw.randrange(1, 12))
    for answer, prompt, length in zip(answers, prompts, lengths, strict=True):
        assert answer.made == alone(model, prompt, length)[0]


@pytest.mark.parametrize("kind", BATCHING)
def test_values_left_in_pages_by_other_sequences_change_no_token(kind: str) -> None:
    """Not even NaN, which stays in a page until it is overwritten."""
    model = tiny.build(kind, **OWN_KINDS.get(kind, {}))
    draw = random.Random(3)
    prompts = [[draw.randrange(tiny.VOCAB) for _ in range(n)] for n in (5, 23, 1, 40, 17)]
    world = PagedWorld(model)
    world.begin(prompts[0], 2)
    while world.running:
        world.step()
    for layer in world.model.paged:
        for pool in (layer.keys, layer.values):
            assert pool is not None
            pool[:] = mx.array(float("nan"), pool.dtype)
    answers = []
    waiting = list(prompts)
    while waiting or world.running:
        if waiting:
            answers.append(world.begin(waiting.pop(0), LENGTH))
        world.step()
    for answer, prompt in zip(answers, prompts, strict=True):
        assert answer.made == alone(model, prompt, LENGTH)[0]


def test_a_model_that_is_not_paged_attends_as_before() -> None:
    paged, other = tiny.build("llama"), tiny.build("llama", seed=1)
    want = alone(other, [1, 2, 3], 4)[0]
    PagedWorld(paged)
    assert SEAM.current.running is None
    assert alone(other, [1, 2, 3], 4)[0] == want
