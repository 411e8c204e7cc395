"""mlx-lm by itself, in a process of its own: `python -m millrace.prove.beside FOLDER WEIGHTS`.

It reads one order a line and answers with one line: tokens of `generate_step`, or the times of a batch of
`BatchGenerator`. Of millrace it uses what comes before MLX is imported (BLAS, sizes of caches) and the
widening of weights where the server widens them: on a CPU mlx-lm would take seconds for a token without it.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import msgspec


class BatchOrder(msgspec.Struct):
    prompts: list[list[int]]
    tokens: int
    timed: bool = False


class Timed(msgspec.Struct, frozen=True):
    """A batch, all of whose prompts came at once."""

    prefill: float
    """Seconds until every row had its first token."""
    decode: float
    """Seconds from then to the end."""
    after: int
    """Tokens that were made in them."""


class BatchReply(msgspec.Struct):
    answers: list[list[int]] = []
    timed: Timed | None = None
    note: str = ""


def main() -> None:
    from millrace.models.device import core, kind

    folder, weights = sys.argv[1:]
    mx = core()
    from mlx_lm import load

    model = load(folder)[0]
    _say(BatchReply())
    note = ""
    if weights != "keep":
        from millrace.models.placement import place

        model = place(model, "f32" if weights == "f32" else "bf16", kind(), own=False)
        mx.eval(model.parameters())
        note = "float32 weights" if weights == "f32" else "bfloat16 weights"
    _say(BatchReply(note=note))
    for line in sys.stdin:
        order = msgspec.json.decode(line, type=BatchOrder)
        if order.timed:
            _say(BatchReply(timed=_timed(model, order)))
        else:
            _say(BatchReply(answers=[_alone(mx, model, p, order.tokens) for p in order.prompts]))


def _alone(mx: Any, model: Any, prompt: list[int], tokens: int) -> list[int]:
    from mlx_lm.generate import generate_step

    return [int(t) for t, _ in generate_step(mx.array(prompt), model, max_tokens=tokens)]


def _timed(model: Any, order: BatchOrder) -> Timed:
    from mlx_lm.generate import BatchGenerator

    rows = len(order.prompts)
    generator = BatchGenerator(model, max_tokens=order.tokens, completion_batch_size=rows)
    begin = time.perf_counter()
    counts = dict.fromkeys(generator.insert(order.prompts, [order.tokens] * rows), 0)
    full: tuple[float, int] | None = None
    made = 0
    while made < rows * order.tokens:
        for response in generator.next()[1]:
            counts[response.uid] += 1
            made += 1
        if full is None and all(counts.values()):
            full = (time.perf_counter(), made)
    end = time.perf_counter()
    generator.close()
    at, before = full or (end, made)
    return Timed(at - begin, end - at, made - before)


def _say(reply: BatchReply) -> None:
    sys.stdout.write(msgspec.json.encode(reply).decode() + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
