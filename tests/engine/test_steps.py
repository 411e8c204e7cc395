"""What a step holds: rows, prompts beside them and draft tokens, as long as the promise allows."""

from __future__ import annotations

from typing import Any

import pytest
from engine.world import World

from millrace.engine.pacing import LEAST
from millrace.protocol import Abort


def test_several_prompts_run_in_one_pass() -> None:
    world = World(rows=8)
    for id in range(6):
        world.submit(id, 60 + id)
    world.run()
    assert world.passes[0] == (0, [60, 61, 62, 63, 64, 65])
    world = World(rows=8, flat=False)
    for id in range(6):
        world.submit(id, 60 + id)
    world.run()
    assert all(len(prompts) <= 1 for _, prompts in world.passes)


def test_prompts_run_beside_rows_in_the_same_pass() -> None:
    world = World(rows=8)
    for id in range(4):
        world.submit(id, 20, 100)
    while len(world.batch) < 4:
        world.turn()
    for id in range(4, 8):
        world.submit(id, 10, 5)
    world.turn()
    assert world.passes[-1] == (4, [10, 10, 10, 10])


@pytest.mark.parametrize("speculate", [0, 4])
@pytest.mark.parametrize("pipelined", [False, True])
def test_no_step_beside_streams_takes_longer_than_was_promised(
    pipelined: bool, speculate: int
) -> None:
    """Prompts come to their end all the same, at the pace that the promise leaves."""
    world = World(rows=16, max_stall=0.3, sequence=0.004, pipelined=pipelined, speculate=speculate)
    for id in range(8):
        world.submit(id, 20 * id, 400)
    while len(world.first) < 8 or len(world.gaps) < 40:
        world.turn()
    world.gaps.clear()
    begun = world.now
    for id in range(8, 12):
        world.submit(id, 3000, 2)
    while len(world.first) < 12:
        world.turn()
    assert max(world.gaps) <= 1.05 * 0.3
    # A step without prompts takes 0.17 s; what is left of 0.3 is used.
    assert world.now - begun < 1.3 * 4 * 3000 * world.token * 0.3 / 0.13


def test_prompts_come_to_their_end_where_no_step_can_keep_the_promise() -> None:
    world = World(rows=4, max_stall=0.01)
    for id in range(3):
        world.submit(id, 20, 10_000)
    while len(world.first) < 3:
        world.turn()
    world.submit(9, 300, 2)
    ran = len(world.passes)
    while 9 not in world.first:
        world.turn()
    assert len(world.passes) - ran <= 300 / LEAST + 3
    assert {sum(prompts) for _, prompts in world.passes[ran + 1 : -3]} == {LEAST}


def test_a_batch_as_wide_as_a_pass_still_lets_prompts_come() -> None:
    world = World(rows=64, chunk=16)
    for id in range(40):
        world.submit(id, 30, 3000)
    while len(world.first) < 40:
        world.turn()
    assert len(world.batch) == 40


@pytest.mark.parametrize("pipelined", [False, True])
def test_what_a_step_takes_is_learned_of_that_step(pipelined: bool) -> None:
    """Also after the last row has ended by an abort, with a draw that nobody reads."""
    world = World(rows=4, pipelined=pipelined, sequence=0.01)
    for id in range(30):
        world.submit(id, 50 + 7 * id, 500)
        for _ in range(9):
            world.turn()
        world.put(Abort(id))
        for _ in range(2):
            world.turn()
    assert not world.decider._launched
    rates = world.decider._pacing.cost.rates
    assert rates[2] == pytest.approx(world.token, rel=0.05)
    assert rates[0] + rates[1] == pytest.approx(world.base + world.sequence, rel=0.05)


def _texts(**how: Any) -> dict[tuple[int, int], list[int]]:
    world = World(rows=4, **how)
    for id in range(10):
        world.submit(id, 10 * id, 40, width=1 + id % 3)
    world.run()
    return world.texts


def test_draft_tokens_change_no_answer_and_need_fewer_steps() -> None:
    assert _texts(speculate=4) == _texts()
    worlds = [World(rows=4, base=0.5, token=1e-4, max_stall=2.0, speculate=n) for n in (0, 4)]
    for world in worlds:
        world.submit(0, 20, 400)
        world.run()
    plain, drafting = (len(world.passes) for world in worlds)
    assert drafting < 0.7 * plain
