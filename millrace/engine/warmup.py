"""Warm-up: run every kind of step once before the engine says ready.

GPU kernels are compiled at their first use, and attention is planned for every new shape; no request
should be the one to wait for it. Sizes come from small sets, so that most of them can be run here.
"""

from __future__ import annotations

import mlx.core as mx

from millrace.cache.state import restore
from millrace.engine.batch import Batch
from millrace.engine.memory import capacity, roomy
from millrace.engine.row import Row
from millrace.engine.runner import Runner
from millrace.engine.sampler import Sampler
from millrace.protocol import Choice, Sampling, Submit

_JOB = 0
_STEPS = 2


def warm_up(
    runner: Runner, sampler: Sampler, rows: int, chunk: int, batch: type[Batch] = Batch
) -> None:
    """Prompts of all lengths and companies, batches of all widths, rows equal and unequal."""
    for length in runner.shapes.lengths(chunk):
        company = 1
        while company == 1 or (runner.trimmable and company * length <= chunk):
            _prompts(runner, company, length)
            company *= 2
    _batches(batch(runner, sampler), runner, rows)
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
                request = Submit(0, [0] * length, [], 64, sampling)
                runner.begin(_JOB, capacity(length))
                runner.chunk(_JOB, [0] * (length - 1), length - 1, beside=False, scored=False)
                batch.join(_JOB, [Row.of(request, Choice(0, 0))], request.prompt)
            for _ in range(_STEPS):
                batch.forward([])
                batch.sample()
                batch.read()
        batch.drop(set(range(len(batch))))


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
