"""What a batch takes while its memory grows, shrinks and is tidied: one layer's share beside its own."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import pytest
from mlx_lm.models import llama

from millrace.engine.memory import Budget, Rectangle
from millrace.engine.runner import Runner
from millrace.engine.shapes import Shapes
from millrace.engine.slots import LayerShape, Positions, SlotKVCache

LAYERS, HEADS, SIZE = 8, 4, 64
ROW = 512


@pytest.fixture
def runner() -> Runner:
    return _filled(recurring=False)


@pytest.fixture
def device() -> Runner:
    """The same, told that steps run on a device of their own."""
    return _filled(recurring=True)


def _filled(*, recurring: bool) -> Runner:
    config = {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 64, "vocab_size": 128,
        "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "head_dim": SIZE,
        "num_key_value_heads": HEADS, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
    }  # fmt: skip
    model = llama.Model(llama.ModelArgs.from_dict(config))
    mx.eval(model.parameters())
    runner = Runner(model, recurring=recurring)
    runner.reserve(Rectangle(8, ROW))
    for job in range(8):
        _begin(runner, job, ROW)
        runner.join(job, 1, ROW - 100)
    return runner


def _begin(runner: Runner, job: int, width: int) -> None:
    """A prompt that has run, without running it."""
    runner.begin(job, width)
    for layer, cache in enumerate(runner._prompts[job]):
        cache.keys = mx.full(cache.keys.shape, job + layer / 16)
        cache.offset = ROW - 100
        mx.eval(cache.keys, cache.values)


def _beside(runner: Runner, work: Callable[[], None]) -> int:
    """Bytes that were held beside what was held before or after."""
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    work()
    while runner.unsettled:
        runner.settle(1, part=True)
    mx.eval([cache.state for cache in runner._batch])
    peak = mx.get_peak_memory()
    return int(peak - max(before, mx.get_active_memory()))


def _keys(runner: Runner, row: int) -> list[list[float]]:
    caches = runner._batch
    return [cache.keys[row, :, : ROW - 100].sum(axis=(0, 2)).tolist() for cache in caches]


def test_growing_and_shrinking_hold_one_layer_twice(runner: Runner) -> None:
    whole, kept = runner.nbytes, _keys(runner, 5)
    assert _beside(runner, lambda: runner.reserve(Rectangle(8, 2 * ROW))) <= 2 * whole // LAYERS
    assert runner.nbytes == 2 * whole and _keys(runner, 5) == kept
    assert _beside(runner, lambda: runner.reserve(Rectangle(8, ROW))) <= whole // LAYERS
    assert runner.nbytes == whole and _keys(runner, 5) == kept


def test_memory_that_is_not_needed_yet_comes_some_layers_at_a_time(runner: Runner) -> None:
    kept, there = _keys(runner, 5), []
    size = Rectangle(64, 2 * ROW)  # a layer of it is 128 MiB
    runner.reserve(size)
    for _ in range(LAYERS):
        runner.step(mx.zeros((8, 1), mx.int32))
        runner.settle(1, part=True)
        there.append([cache.size for cache in runner._batch].count(size))
    assert there == list(range(1, LAYERS + 1))
    assert not runner.unsettled and _keys(runner, 5) == kept


@pytest.mark.parametrize(("alone", "at_once"), [(False, 1), (True, 3)])
def test_more_of_it_comes_where_nothing_else_is_beside_a_step(
    runner: Runner, alone: bool, at_once: int
) -> None:
    size = Rectangle(8, 2 * ROW)  # a layer of it is 16 MiB
    runner.reserve(size)
    runner.settle(1, part=True, alone=alone)
    assert [cache.size for cache in runner._batch].count(size) == at_once


def test_rows_come_and_go_while_memory_for_others_comes(runner: Runner) -> None:
    kept = [_keys(runner, row) for row in range(8)]
    runner.reserve(Rectangle(64, 2 * ROW))
    runner.step(mx.zeros((8, 1), mx.int32))
    runner.settle(1, part=True)
    runner.keep_rows([0, 1, 2, 7])
    _begin(runner, 8, ROW)
    runner.join(8, 1, ROW - 100)
    assert {cache.size.slots for cache in runner._batch} == {8, 64}
    assert [_keys(runner, row) for row in range(4)] == [kept[i] for i in (0, 1, 2, 7)]
    _begin(runner, 9, ROW)
    runner.join(9, 4, ROW - 100)  # these do not fit what is there
    assert not runner.unsettled
    assert [_keys(runner, row) for row in range(4)] == [kept[i] for i in (0, 1, 2, 7)]


def test_memory_that_is_needed_comes_at_once(runner: Runner) -> None:
    kept = _keys(runner, 5)
    runner.reserve(Rectangle(8, 2 * ROW))
    runner.step(mx.zeros((8, 101), mx.int32))
    assert not runner.unsettled and _keys(runner, 5) == kept


def test_rows_that_move_into_holes_copy_themselves_only(runner: Runner) -> None:
    whole, kept = runner.nbytes, [_keys(runner, row) for row in range(8)]
    moved = _beside(runner, lambda: runner.keep_rows([0, 7, 2, 3, 6, 5]))
    assert moved <= whole // LAYERS // 2
    assert [_keys(runner, row) for row in range(6)] == [kept[i] for i in (0, 7, 2, 3, 6, 5)]


def test_a_row_that_joins_is_not_held_twice(runner: Runner) -> None:
    whole, long = runner.nbytes, 8 * ROW
    runner.keep_rows([0])
    _begin(runner, 8, long)

    def join() -> None:
        runner.reserve(Rectangle(2, long))
        runner.join(8, 1, ROW - 100)

    assert _beside(runner, join) <= 2 * whole // LAYERS
    assert runner.nbytes == 2 * whole


@pytest.mark.parametrize(
    ("size", "waits"),
    [
        (Rectangle(8, ROW // 4 * 7), 2),  # a layer of it is 14 MiB: four at a time
        (Rectangle(8, ROW // 4 * 5), 2),  # 10 MiB: six and two
        (Rectangle(64, 2 * ROW), 2 * LAYERS),  # 128 MiB: its keys and its values
    ],
)
@pytest.mark.parametrize("joins", [False, True])
def test_a_device_is_waited_for_after_many_small_layers_and_not_after_each(
    device: Runner, monkeypatch: pytest.MonkeyPatch, size: Rectangle, waits: int, joins: bool
) -> None:
    kept = [_keys(device, row) for row in range(7)]
    device.keep_rows(list(range(7)))
    _begin(device, 8, ROW)
    waited: list[object] = []
    run = mx.eval

    def wait(*arrays: object) -> None:
        if arrays != ([],):
            waited.append(arrays)
        run(*arrays)

    monkeypatch.setattr("millrace.engine.slots.mx.eval", wait)
    device.reserve(size)
    if joins:
        device.join(8, 1, ROW + 1)
    else:
        device.settle(101)
    monkeypatch.undo()
    assert len(waited) == waits and not device.unsettled
    assert [_keys(device, row) for row in range(7)] == kept


def test_a_device_holds_few_layers_twice(device: Runner) -> None:
    kept = _keys(device, 5)
    assert _beside(device, lambda: device.reserve(Rectangle(8, 2 * ROW))) <= 64 << 20
    assert _keys(device, 5) == kept


@pytest.mark.parametrize("rows", [1, 2, 4, 8, 16, 64])
@pytest.mark.parametrize("width", [256, 512, 1024, 3840, 4096])
def test_few_equal_rows_of_a_device_need_no_plan_of_their_width(rows: int, width: int) -> None:
    """On CUDA, memory whose width is a multiple of 256 has each number of rows and each width planned."""
    shape = LayerShape(1, 8, 8, mx.float32, margin=8)
    layer = SlotKVCache(Positions(Shapes(recurring=True)), shape)
    layer.resize(Rectangle(rows, width), 0)
    assert layer.keys is not None
    planned = layer.keys.shape[2] % 256 == 0
    assert planned == (rows * width >= 1 << 14 or width >= 4096)
    assert layer.nbytes == layer.bytes_of(layer.size)


def test_what_a_device_has_beyond_a_width_is_counted(device: Runner) -> None:
    budget = Budget(device.cost, 1 << 40)
    for size in (Rectangle(8, ROW), Rectangle(8, 2 * ROW), Rectangle(64, ROW)):
        device.reserve(size)
        device.settle(ROW)
        assert device.nbytes <= budget.rectangle(size, 8) <= 1.02 * device.nbytes
    _begin(device, 8, ROW)
    held = device.nbytes
    device.release(8)
    assert held - device.nbytes == budget.row(ROW - 1)


def test_the_memory_of_a_lone_prompt_still_changes_hands(device: Runner) -> None:
    device.keep_rows([])
    device.reserve(Rectangle(1, ROW))
    _begin(device, 8, ROW)
    keys = [cache.keys for cache in device._prompts[8]]
    device.join(8, 1, ROW - 100)
    assert all(mine.keys is theirs for mine, theirs in zip(device._batch, keys, strict=True))
