"""The pacing rule in a simulated world: the promise is kept, prompts come to their end, noise is noise."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.engine.pacing import (
    LEAST,
    Pacing,
    StepCost,
    StepSize,
    decode_size,
    prompt_size,
)

GPU = (0.012, 2e-5, 2e-5, 2e-9)
CPU = (0.006, 0.004, 0.003, 4e-8)
RATES = {"gpu": GPU, "cpu": CPU}


def _seconds(rates: tuple[float, ...], size: StepSize) -> float:
    parts = (size.steps, size.sequences, size.tokens, size.keys)
    return sum(r * p for r, p in zip(rates, parts, strict=True))


@pytest.mark.parametrize("device", RATES)
def test_the_line_is_found_under_noise_and_slow_steps(device: str) -> None:
    rates, draw, cost = RATES[device], random.Random(1), StepCost()
    for _ in range(300):
        lengths = [draw.randrange(1, 3000) for _ in range(draw.randrange(0, 64))]
        size = decode_size(lengths) + prompt_size(draw.randrange(3000), draw.randrange(512))
        noise = draw.gauss(1, 0.05) * (10 if draw.random() < 0.03 else 1)
        cost.saw(size, _seconds(rates, size) * max(0.5, noise))
    for _ in range(50):
        size = decode_size([500] * draw.randrange(1, 64)) + prompt_size(0, draw.randrange(512))
        assert cost.seconds(size) == pytest.approx(_seconds(rates, size), rel=0.15)


@given(
    st.lists(
        st.tuples(
            st.integers(0, 3),
            st.integers(0, 256),
            st.integers(0, 4096),
            st.integers(0, 10**8),
            st.floats(0, 10, allow_nan=False),
        ),
        min_size=1,
        max_size=60,
    )
)
@settings(deadline=None)
def test_no_rate_is_negative_whatever_was_measured(
    samples: list[tuple[int, int, int, int, float]],
) -> None:
    cost = StepCost()
    for *size, seconds in samples:
        cost.saw(StepSize(*size), seconds)
    assert all(rate >= 0 for rate in cost.rates)


@given(
    running=st.integers(1, 256),
    context=st.integers(0, 100_000),
    left=st.integers(1, 100_000),
    stall=st.floats(0.01, 2),
)
def test_what_is_planned_keeps_the_promise(
    running: int, context: int, left: int, stall: float
) -> None:
    pacing = Pacing(stall, 2048)
    draw = random.Random(1)
    for _ in range(64):
        size = decode_size([500] * draw.randrange(1, 64)) + prompt_size(0, draw.randrange(512))
        pacing.cost.saw(size, _seconds(GPU, size))
    planned = decode_size([500] * running)
    room = pacing.room(planned, context, left)
    assert 0 <= room <= min(left, 2048 - planned.tokens)
    if room:
        assert pacing.cost.seconds(planned + prompt_size(context, room)) <= stall


@dataclass
class Prompt:
    arrived: float
    length: int
    answer: int
    done: int = 0
    made: int = 0
    first: float | None = None
    last: float = 0.0


@dataclass
class Loop:
    """Clients that ask again as soon as they are answered, on a device of these rates."""

    rates: tuple[float, ...]
    max_stall: float
    clients: int
    seed: int = 1
    now: float = 0.0
    gaps: list[float] = field(default_factory=list)
    firsts: list[float] = field(default_factory=list)
    made: int = 0

    def run(self, steps: int) -> None:
        self.draw = random.Random(self.seed)
        self.pacing = Pacing(self.max_stall, 2048)
        self.waiting = [self._ask() for _ in range(self.clients)]
        self.running: list[Prompt] = []
        for _ in range(steps):
            self._step()

    def _ask(self) -> Prompt:
        length = min(3000, max(16, int(self.draw.lognormvariate(5.6, 0.9))))
        answer = min(400, max(16, int(self.draw.lognormvariate(4.9, 0.7))))
        return Prompt(self.now, length, answer)

    def _step(self) -> None:
        size = decode_size([p.length + p.made for p in self.running])
        taken = []
        for prompt in sorted(self.waiting, key=lambda p: p.length - p.done):
            left = prompt.length - prompt.done
            room = self.pacing.room(size, prompt.done, left)
            count = max(room, self.pacing.progress(len(taken), left))
            if not count:
                break
            taken.append((prompt, count))
            size = size + prompt_size(prompt.done, count)
        noise = max(0.7, self.draw.gauss(1, 0.04)) * (5 if self.draw.random() < 0.005 else 1)
        seconds = _seconds(self.rates, size) * noise
        self.now += seconds
        self.pacing.cost.saw(size, seconds)
        self.gaps += [seconds] * len(self.running)
        for prompt in [*self.running]:
            self._drew(prompt)
        for prompt, count in taken:
            prompt.done += count
            if prompt.done == prompt.length:
                self.waiting.remove(prompt)
                self.running.append(prompt)
                self.firsts.append(self.now - prompt.arrived)
                self._drew(prompt)

    def _drew(self, prompt: Prompt) -> None:
        prompt.made += 1
        self.made += 1
        if prompt.made >= prompt.answer:
            self.running.remove(prompt)
            self.waiting.append(self._ask())


@pytest.mark.parametrize("clients", [1, 16, 64, 128])
def test_a_closed_loop_keeps_the_promise(clients: int) -> None:
    loop = Loop(GPU, max_stall=0.1, clients=clients)
    loop.run(1500)
    gaps = sorted(loop.gaps)
    full = _seconds(GPU, decode_size([600] * clients))
    assert gaps[int(0.99 * len(gaps))] <= 0.1 + full
    firsts = sorted(loop.firsts)
    assert firsts[len(firsts) // 2] < 0.3


def test_prompts_end_on_a_device_too_slow_for_the_promise() -> None:
    loop = Loop(CPU, max_stall=0.001, clients=8)
    loop.run(3000)
    assert len(loop.firsts) > 8


def test_a_prompt_that_runs_alone_is_bounded_by_the_step_only() -> None:
    pacing = Pacing(0.05, 2048)
    assert pacing.room(StepSize(1), 0, 30_000) == 2048
    assert pacing.progress(0, 5) == 5
    assert pacing.progress(0, 500) == LEAST
