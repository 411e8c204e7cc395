"""Prompts side by side on a CPU, a core each.

Much of a forward pass there is work on one core: all that is no matrix product. With a prompt on each
core, none of them waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from millrace.engine.prefill import Job
from millrace.models import blas


class Lanes:
    def __init__(self, cores: int) -> None:
        self._streams = [mx.new_stream(mx.cpu) for _ in range(cores)]

    def __len__(self) -> int:
        return len(self._streams)

    def run(self, model: Any, jobs: Sequence[Job], count: int) -> None:
        """Run up to `count` tokens of as many prompts as there are lanes, to the end."""
        with blas.one_thread():
            for stream, job in zip(self._streams, jobs, strict=True):
                with mx.stream(stream):
                    job.plan(model, min(count, job.left))
            # At once: MLX launches little more than it can run, so one after the other would wait.
            mx.eval([job.states for job in jobs])
