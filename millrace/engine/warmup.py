"""Warm-up: run every kind of step once before the engine says ready.

GPU kernels are compiled at their first use, and a new shape may cost a plan or a captured graph; no request
should be the one to wait for it. A pass has one shape, its number of tokens, from a small set.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from millrace.cache.state import RestoredState, restore_checkpoint
from millrace.engine.batch import Batch, PrefillChunk
from millrace.engine.grammar import only
from millrace.engine.row import Row
from millrace.engine.runner import Runner, SequenceRun
from millrace.engine.sampler import Sampler
from millrace.protocol import Choice, Sampling, Submit

_PREFILL = 1 << 40
"""Numbers that no sequence has."""
_STEPS = 2
_AMONG = 4
"""Rows of a batch of which one draws otherwise than the others."""
_STOP = 1
_PROMPT = 17
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
    """Passes of all sizes, batches of all widths alone and beside a prompt, and draws of all kinds."""
    for size in runner.shapes.sizes(chunk):
        _prompt(runner, size)
    _batches(batch(runner, sampler), runner, rows)
    # Ranks that do not draw run the same passes: a group's others wait for them in each.
    _draws(batch(runner, sampler), runner, min(rows, _AMONG))
    _keep_and_restore(runner, chunk)
    mx.clear_cache()


def warm_up_draft(runner: Runner, chunk: int) -> None:
    """Prompts of all sizes, and a look ahead."""
    for size in runner.shapes.sizes(chunk):
        _prompt(runner, size)
    runner.begin(_PREFILL)
    mx.eval(runner.peek(_PREFILL, mx.array([0], mx.int32))[0])
    runner.drop(_PREFILL)


def _prompt(runner: Runner, length: int) -> None:
    runner.begin(_PREFILL)
    runner.run(mx.zeros((length,), mx.int32), [SequenceRun(_PREFILL, length)], [])
    runner.wait()
    runner.drop(_PREFILL)


def _batches(batch: Batch, runner: Runner, rows: int) -> None:
    for width in runner.shapes.sizes(rows):
        while len(batch) < width:
            sampling = Sampling(1.0, top_p=0.9, top_k=40) if len(batch) % 2 else Sampling(0.0)
            _join(batch, runner, Submit(0, [0] * _PROMPT, [], 64, sampling))
        for _ in range(_STEPS):
            _step(batch)
        if runner.flat:
            runner.begin(_PREFILL)
            _step(batch, PrefillChunk(_PREFILL, [0] * _PROMPT))
            runner.drop(_PREFILL)
    if batch:
        batch.drop(set(range(len(batch))))


def _step(batch: Batch, *prompts: PrefillChunk) -> None:
    batch.forward([], prompts)
    batch.sample()
    batch.read()


def _join(batch: Batch, runner: Runner, request: Submit) -> None:
    number = _PREFILL + 1 + len(batch)
    length = len(request.prompt) - 1
    runner.begin(_PREFILL)
    runner.run(mx.zeros((length,), mx.int32), [SequenceRun(_PREFILL, length)], [])
    batch.join(_PREFILL, [Row.of(request, Choice(0, 0), number)], request.prompt)


def _draws(batch: Batch, runner: Runner, rows: int) -> None:
    """Each way of drawing, by one of some rows and by all of them."""
    plain = Submit(0, [0] * _PROMPT, [], 64, Sampling(0.0), [_STOP])
    wanted = [Submit(0, plain.prompt, [], 64, sampling, [_STOP]) for sampling in _DRAWS]
    wanted += [
        Submit(0, plain.prompt, [], 64, Sampling(1.0), [_STOP], logprobs=top) for top in (0, 5)
    ]
    for one in wanted:
        for others in ([plain] * (rows - 1), [one] * (rows - 1)):
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


def _keep_and_restore(runner: Runner, length: int) -> None:
    """The copies that the prefix cache makes."""
    layout = runner.layout
    runner.begin(_PREFILL)
    runner.run(mx.zeros((length,), mx.int32), [SequenceRun(_PREFILL, length)], [])
    source, segments = runner.state_of(_PREFILL), runner.segments(pack=False)
    segment = segments.keep(source, 0, length) if layout.cuttable else None
    found = RestoredState(runner.make_caches())
    if segment is not None:
        segments.payload(segment)
        found.pages = segments.restore(found.caches, layout, [segment], length)
    if layout.rest:
        restore_checkpoint(found.caches, layout, source.checkpoint(), length, length)
    runner.begin(_PREFILL)
    runner.adopt(_PREFILL, found, length)
    runner.wait()
    if segment is not None:
        segments.release(segment)
    runner.drop(_PREFILL)
