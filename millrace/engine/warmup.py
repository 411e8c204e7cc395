"""Warm-up: run every kind of step once before the engine says ready.

GPU kernels are compiled at their first use, and attention is planned for every new shape; no request
should be the one to wait for it. Sizes come from small sets, so that most of them can be run here.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from millrace.cache.state import restore
from millrace.engine.batch import Batch
from millrace.engine.grammar import only
from millrace.engine.memory import capacity, roomy
from millrace.engine.row import Row
from millrace.engine.runner import Runner
from millrace.engine.sampler import Sampler
from millrace.protocol import Choice, Sampling, Submit

_JOB = 0
_STEPS = 2
_AMONG = 4
"""Rows of a batch of which one draws otherwise than the others."""
_STOP = 1
_DRAWS = (
    Sampling(0.0),
    Sampling(1.0),
    Sampling(1.0, top_p=0.9),
    Sampling(1.0, top_k=40),
    Sampling(1.0, min_p=0.1),
    Sampling(1.0, typical_p=0.9),
    Sampling(1.0, xtc_probability=1.0, xtc_threshold=0.01),
    Sampling(0.0, repetition_penalty=1.1, presence_penalty=0.1, frequency_penalty=0.1),
    Sampling(1.0, logit_bias={2: 1.0}, bad_words=[[3]], min_tokens=9),
)


def warm_up(
    runner: Runner, sampler: Sampler, rows: int, chunk: int, batch: type[Batch] = Batch
) -> None:
    """Prompts of all lengths and companies, batches of all widths, rows equal and unequal, and draws of
    all kinds."""
    for length in runner.shapes.lengths(chunk):
        company = 1
        while company == 1 or (runner.trimmable and company * length <= chunk):
            _prompts(runner, company, length)
            company *= 2
    _batches(batch(runner, sampler), runner, rows)
    # Ranks that do not draw run the same passes: a group's others wait for them in each.
    _draws(batch(runner, sampler), runner, min(rows, _AMONG))
    for length in (chunk, chunk // 2):
        _keep_and_find(runner, length)
    mx.clear_cache()


def warm_up_draft(runner: Runner, chunk: int) -> None:
    """Prompts of all lengths, one at a time, and a look ahead."""
    for length in runner.shapes.lengths(chunk):
        _prompts(runner, 1, length)
    runner.begin(_JOB, capacity(chunk))
    mx.eval(runner.peek(_JOB, mx.array([[0]], mx.int32))[0])
    runner.release(_JOB)


def _prompts(runner: Runner, company: int, length: int) -> None:
    tokens = [0] * length
    if company == 1:
        runner.begin(_JOB, capacity(length))
        runner.chunk(_JOB, tokens, length, beside=False, scored=False)
        runner.wait(_JOB)
    else:
        runs = dict.fromkeys(range(company), tokens)
        runner.together(runs, length, beside=False)
        for job in runs:
            runner.wait(job)
            runner.release(job)
    runner.release(_JOB)


def _batches(batch: Batch, runner: Runner, rows: int) -> None:
    widths = sorted({runner.shapes.rows(n) for n in range(1, rows + 1)})
    for unequal in (False, True):
        for width in widths:
            runner.reserve(roomy(width, 128))
            while len(batch) < width:
                length = 17 + 8 * unequal * len(batch) % 64
                sampling = Sampling(1.0, top_p=0.9, top_k=40) if len(batch) % 2 else Sampling(0.0)
                _join(batch, runner, Submit(0, [0] * length, [], 64, sampling))
            for _ in range(_STEPS):
                batch.forward([])
                batch.sample()
                batch.read()
        batch.drop(set(range(len(batch))))


def _join(batch: Batch, runner: Runner, request: Submit) -> None:
    length = len(request.prompt)
    runner.begin(_JOB, capacity(length))
    runner.chunk(_JOB, [0] * (length - 1), length - 1, beside=False, scored=False)
    batch.join(_JOB, [Row.of(request, Choice(0, 0))], request.prompt)


def _draws(batch: Batch, runner: Runner, rows: int) -> None:
    """Each way of drawing, by one of some rows and by all of them."""
    plain = Submit(0, [0] * 17, [], 64, Sampling(0.0), [_STOP])
    wanted = [Submit(0, plain.prompt, [], 64, sampling, [_STOP]) for sampling in _DRAWS]
    wanted += [
        Submit(0, plain.prompt, [], 64, Sampling(1.0), [_STOP], logprobs=top) for top in (0, 5)
    ]
    for one in wanted:
        for others in ([plain] * (rows - 1), [one] * (rows - 1)):
            runner.reserve(roomy(rows, 128))
            for request in (one, *others):
                _join(batch, runner, request)
            batch.forward([])
            _bind(batch)
            batch.sample()
            batch.read()
            batch.drop(set(range(len(batch))))


def _bind(batch: Batch) -> None:
    """What a grammar does to logits, of one row and of all."""
    logits = batch.logits
    assert logits is not None
    if not logits.shape[-1]:
        return  # the model's head is another rank's
    words = -(-logits.shape[-1] // 32)
    for count in {1, len(batch)}:
        table = np.full((count, words), -1, np.int32)
        mx.eval(only(logits[...], list(range(count)), table))


def _keep_and_find(runner: Runner, length: int) -> None:
    """The copies that the prefix cache makes."""
    layout = runner.layout
    runner.begin(_JOB, capacity(length))
    runner.chunk(_JOB, [0] * length, length, beside=False, scored=False)
    state = runner.prompt_state(_JOB)
    half = length // 2
    parts = [state.segment(a, b, False) for a, b in ((0, half), (half, length))]
    mx.eval([part.arrays for part in parts])
    checkpoint = state.checkpoint() if layout.rest else None
    found = restore(runner.make_caches(), layout, length, parts, checkpoint, length)
    mx.eval([c.state for c in found])
    runner.release(_JOB)
