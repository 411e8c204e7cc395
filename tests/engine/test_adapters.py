"""Rows with adapters of their own in one batch: each as if it ran alone, by the model with its adapter
merged into the weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from adapters_help import SMALL, linear_shapes, merge, random_pairs, write_mlx, write_peft
from engine.harness import Bench, greedy_alone
from tiny import VOCAB, build

from millrace.engine.memory import Budget
from millrace.engine.turn import Drop, Release, decoder
from millrace.protocol import (
    AdapterLoaded,
    AdapterRefused,
    Choice,
    LoadAdapter,
    Sampling,
    Submit,
    UnloadAdapter,
)

COUNT = 24


def prompt_of(seed: int, length: int) -> list[int]:
    return [(seed * 37 + 11 * k * k + k) % (VOCAB - 3) + 3 for k in range(length)]


def request(id: int, prompt: list[int], adapter: int, **more: Any) -> Submit:
    return Submit(id, prompt, [Choice(0, id)], COUNT, Sampling(0.0), adapter=adapter, **more)


def load(bench: Bench, slot: int, folder: Path) -> AdapterLoaded:
    bench.put(LoadAdapter(slot, f"a{slot}", str(folder)))
    wait_for(bench, slot)
    answer = bench.adapters[slot]
    assert isinstance(answer, AdapterLoaded), answer
    return answer


def wait_for(bench: Bench, slot: int) -> None:
    while slot not in bench.adapters:
        bench.turn()


@pytest.fixture(scope="module", params=["llama", "qwen3", "gemma3_text"])
def shape(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def folders(shape: str, root: Path) -> dict[int, tuple[Path, Any, float]]:
    """Four adapters of several ranks, targets and forms; by slot, with their factors and scale."""
    shapes = linear_shapes(build(shape))
    found: dict[int, tuple[Path, Any, float]] = {}
    for slot, (rank, targets) in enumerate(
        ((4, SMALL), (8, ()), (3, ("down_proj",)), (16, SMALL)), 1
    ):
        pairs = random_pairs(shapes, rank, seed=slot, targets=targets)
        if slot % 2:
            found[slot] = write_mlx(root / f"a{slot}", pairs, 0.7), pairs, 0.7
        else:
            found[slot] = write_peft(root / f"a{slot}", pairs, rank * 0.9), pairs, 0.9
    return found


@pytest.mark.parametrize("gathers", [False, True])
@pytest.mark.parametrize("how", [{}, {"speculate": 4}, {"prefill_chunk": 16, "max_running": 3}])
def test_eight_rows_of_four_adapters_and_none_equal_the_merged_models(
    shape: str, how: dict[str, Any], gathers: bool, tmp_path: Path
) -> None:
    adapters = folders(shape, tmp_path)
    bench = Bench(build(shape), cache=1 << 24, **how)
    # As on a GPU; MLX's product by index gives the same on a CPU, slowly.
    bench.engine._executor._runner.adapters._gathers = gathers  # type: ignore[attr-defined]
    for slot, (folder, _, _) in adapters.items():
        load(bench, slot, folder)
    wanted = {}
    slots = [0, 1, 2, 3, 4, 1, 2, 0]
    for id, slot in enumerate(slots):
        model = build(shape)
        if slot:
            merge(model, *adapters[slot][1:])
        wanted[id, 0] = greedy_alone(model, prompt_of(id % 3, 20 + 5 * (id % 3)), COUNT)
    got = bench.run(
        request(id, prompt_of(id % 3, 20 + 5 * (id % 3)), slot) for id, slot in enumerate(slots)
    )
    assert got == wanted
    assert len({tuple(tokens) for tokens in wanted.values()}) > 4


def test_an_adapter_finds_its_own_state_and_nobody_elses(tmp_path: Path) -> None:
    adapters = folders("llama", tmp_path)
    bench = Bench(build("llama"), cache=1 << 24)
    digests = {slot: load(bench, slot, folder).digest for slot, (folder, _, _) in adapters.items()}
    assert len(set(digests.values())) == 4
    prompt = prompt_of(1, 40)
    for id, slot in enumerate((0, 1, 2, 0, 1, 2)):
        bench.run([request(id, prompt, slot)])
        assert bench.found[id].cached == (0 if id < 3 else len(prompt) - 1), id
    # A salt that is written like an adapter's is a salt of its own.
    forged = f"\x01{digests[1]}\x01"
    bench.run([request(9, prompt, 0, cache_salt=forged)])
    assert bench.found[9].cached == 0
    assert bench.generated[9, 0] == bench.generated[0, 0]


def test_another_adapter_in_a_slot_finds_nothing_of_the_one_before(tmp_path: Path) -> None:
    adapters = folders("llama", tmp_path)
    bench = Bench(build("llama"), cache=1 << 24)
    prompt = prompt_of(1, 40)
    load(bench, 1, adapters[2][0])
    bench.run([request(1, prompt, 1)])
    bench.put(UnloadAdapter(1), turns=1)
    bench.adapters.clear()
    load(bench, 1, adapters[4][0])
    bench.run([request(2, prompt, 1)])
    assert bench.found[2].cached == 0
    wanted = greedy_alone(merge(build("llama"), *adapters[4][1:]), prompt, COUNT)
    assert bench.generated[2, 0] == wanted != bench.generated[1, 0]
    bench.put(UnloadAdapter(1), turns=1)
    bench.run([request(3, prompt, 1)])
    assert "not loaded" in bench.failed[3].message


def test_rows_that_give_way_and_several_choices_keep_their_adapter(tmp_path: Path) -> None:
    adapters = folders("llama", tmp_path)
    plain = Bench(build("llama"))
    tight = Bench(build("llama"), budget=Budget(plain.budget.cost, 60_000), cache=1 << 22)
    for bench in (plain, tight):
        for slot in (1, 2):
            load(bench, slot, adapters[slot][0])
    asked = [
        Submit(
            id,
            prompt_of(id, 30),
            [Choice(k, 7 * id + k) for k in range(2)],
            30,
            Sampling(0.8),
            adapter=id % 3,
            priority=id % 2,
        )
        for id in range(6)
    ]
    wanted = {}
    for submit in asked:
        wanted |= plain.run([submit])
    assert tight.run(asked, turns=3) == wanted
    assert any(
        isinstance(o, Release | Drop)
        for _, t in tight.journal
        for o in decoder.decode(t).operations
    )


def test_a_recorded_run_with_adapters_replays(tmp_path: Path) -> None:
    adapters = folders("llama", tmp_path)
    first = Bench(build("llama"), cache=1 << 22, speculate=4)
    second = Bench(build("llama"), cache=1 << 22, speculate=4)
    for slot in (1, 2):
        load(first, slot, adapters[slot][0])
    first.run((request(id, prompt_of(id % 2, 30), id % 3) for id in range(9)), turns=2)
    first.put(UnloadAdapter(2), turns=1)
    for _, turn in first.journal:
        second.engine._executor.execute(decoder.decode(turn), second._deliver)
    assert second.generated == first.generated


@pytest.mark.parametrize("pipelined", [False, True])
def test_a_step_launched_ahead_runs_with_the_rows_own_adapters(
    pipelined: bool, tmp_path: Path
) -> None:
    """Rows join and leave at every turn, so that places in the batch change hands."""
    adapters = folders("llama", tmp_path)
    bench = Bench(build("llama"), pipelined=pipelined, recurring=pipelined, max_running=4)
    merged = {0: build("llama")}
    for slot, (folder, pairs, scale) in adapters.items():
        load(bench, slot, folder)
        merged[slot] = merge(build("llama"), pairs, scale)
    asked = [request(id, prompt_of(id, 5 + id % 7), id % 5) for id in range(15)]
    for id, submit in enumerate(asked):
        submit.max_tokens = 3 + 5 * id % 13
    bench.run(asked, turns=2)
    for id, submit in enumerate(asked):
        wanted = greedy_alone(merged[id % 5], submit.prompt, submit.max_tokens)
        assert bench.generated[id, 0] == wanted


def test_what_does_not_fit_the_model_or_the_room_is_refused(tmp_path: Path) -> None:
    bench = Bench(build("llama"))
    shapes = linear_shapes(build("llama"))
    wide = {name: (inputs + 1, outputs) for name, (inputs, outputs) in shapes.items()}
    strange = {f"{name}_x": shape for name, shape in shapes.items()}
    for slot, (given, word) in enumerate(
        ((wide, "another model"), (strange, "no linear layer")), 1
    ):
        folder = write_mlx(tmp_path / f"bad{slot}", random_pairs(given))
        bench.put(LoadAdapter(slot, "bad", str(folder)))
        wait_for(bench, slot)
        answer = bench.adapters[slot]
        assert isinstance(answer, AdapterRefused) and word in answer.message
    folder = write_mlx(tmp_path / "good", random_pairs(shapes, 16))
    bench.engine._adapters._room = 20_000
    bench.put(LoadAdapter(3, "good", str(folder)))
    wait_for(bench, 3)
    answer = bench.adapters[3]
    assert isinstance(answer, AdapterRefused) and "at most 20 kB" in answer.message
    bench.engine._adapters._room = 1 << 30
    digest = load(bench, 4, folder).digest
    bench.put(LoadAdapter(5, "good", str(folder), digest))
    wait_for(bench, 5)
    assert isinstance(bench.adapters[5], AdapterLoaded)
    write_mlx(tmp_path / "good", random_pairs(shapes, 8))
    bench.put(LoadAdapter(6, "good", str(folder), digest))
    wait_for(bench, 6)
    answer = bench.adapters[6]
    assert isinstance(answer, AdapterRefused) and "not those that were loaded" in answer.message
