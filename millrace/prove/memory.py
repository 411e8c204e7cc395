"""What an engine holds under load, against its weights and the budgets it was given.

The load asks for several times as much state as there is room for. On a GPU the device's memory counts,
as MLX tells it; elsewhere what the system says is resident.
"""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor

from millrace.errors import SetupError
from millrace.prove.equalities import Doing
from millrace.prove.processes import resident
from millrace.prove.questions import Question, QuestionSettings, text_of
from millrace.prove.report import ReportLine, Verdict
from millrace.prove.served import Served, ServedState
from millrace.sizes import format_bytes

SLACK = 1.15
_CLIENTS = 8
_LEAST_ON_CPU = 48 << 20
_LEAST_ON_GPU = 256 << 20
"""What a chunk of a prompt takes while it runs is much beside the weights of a small model."""
_GPU_LOAD = 3
"""Times as many requests, which a GPU has done in no more time."""
_HELD_TOKENS = 2400


def budget(state: ServedState) -> int:
    """Bytes for running state, and as many for prefixes: small, so that the load goes beyond them."""
    least = _LEAST_ON_CPU if state.device == "cpu" else _LEAST_ON_GPU
    return max(least, int(_HELD_TOKENS * (state.kv_bytes_per_token or 0)))


class _Watch:
    """The most that was held while it looked."""

    def __init__(self, server: Served) -> None:
        self.rest = server.state()
        self._server = server
        self.on_cpu = self.rest.device == "cpu"
        self.most = self.state = self.freed = 0

    def held(self, state: ServedState) -> int:
        if not self.on_cpu:
            return state.device_memory.active if state.device_memory else 0
        found = None if state.engine_pid is None else resident(state.engine_pid)
        if found is None:
            raise SetupError("Nobody says how much memory the engine's process has.")
        return found

    def look(self) -> None:
        state = self._server.state()
        self.most = max(self.most, self.held(state))
        self.state = max(self.state, state.kv_bytes)
        if state.device_memory is not None:
            self.freed = max(self.freed, state.device_memory.cached)

    def until(self, ended: threading.Event) -> None:
        while not ended.wait(0.05):
            self.look()


def under_load(
    server: Served, settings: QuestionSettings, given: int, doing: Doing
) -> list[ReportLine]:
    watch = _Watch(server)
    rest = watch.rest
    weights = rest.weight_bytes or 0
    # A process holds more than weights from the start: the interpreter, libraries, a grammar's vocabulary.
    base = watch.held(rest) - rest.cache_bytes - rest.kv_bytes if watch.on_cpu else weights
    _load(server, settings, watch, doing)
    allowed = int(SLACK * (base + 2 * given))
    what = "resident" if watch.on_cpu else "on the device"
    beside = f"{format_bytes(base)} {'before the load' if watch.on_cpu else 'weights'}"
    detail = (
        f"at most {format_bytes(watch.most)} {what}, allowed {format_bytes(allowed)} ({beside}, "
        f"{format_bytes(given)} for state and as much for prefixes, and 15 %); "
        f"weights {format_bytes(weights)}; state at most {format_bytes(watch.state)}"
    )
    if not watch.on_cpu:
        detail += f"; freed buffers that MLX keeps besides at most {format_bytes(watch.freed)}"
    figures: dict[str, float | int | str | None] = {
        "most": watch.most,
        "allowed": allowed,
        "base": base,
        "weights": weights,
        "budget_each": given,
        "state_most": watch.state,
    }
    held = watch.most <= allowed and watch.state <= given
    verdict: Verdict = "pass" if held else "fail"
    return [ReportLine(check="memory", verdict=verdict, detail=detail, figures=figures)]


def _load(server: Served, settings: QuestionSettings, watch: _Watch, doing: Doing) -> None:
    """More than there is room for, from several clients."""
    dice = random.Random(1)
    todo = [
        Question(
            text_of(f"load/{i}", dice.randint(20, settings.longest), server.tokenize),
            dice.randint(8, settings.tokens),
            None if i % 2 else i,
        )
        for i in range(settings.load * (1 if watch.on_cpu else _GPU_LOAD))
    ]
    ended = threading.Event()
    with ThreadPoolExecutor(_CLIENTS + 1) as pool:
        looking = pool.submit(watch.until, ended)
        try:
            pending = [pool.submit(server.ask, q, salt=f"load {i}") for i, q in enumerate(todo)]
            for n, future in enumerate(pending):
                doing(f"memory: answer {n + 1} of {len(todo)}")
                future.result()
        finally:
            ended.set()
        looking.result()
    watch.look()
