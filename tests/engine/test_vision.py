"""Each proven family: batched equals alone equals mlx-vlm's own generate, token for token, whatever comes
and goes beside it."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from engine.vision_world import COUNT, EARLIER, GREEDY, ONE, PLAIN, THREE, Eyes, World
from pictures import animated, painted
from vision_kinds import VARIANTS
from vision_models import picture

from millrace.engine.vision_inputs import _array
from millrace.models.vision.families import FAMILIES
from millrace.models.vision.model import VisionLanguageModel
from millrace.models.vision.stages import Pace
from millrace.protocol import Choice, Submit

_attention = mx.fast.scaled_dot_product_attention


@pytest.fixture(scope="module", params=[*(f.model_type for f in FAMILIES), *VARIANTS])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(request.param, tmp_path_factory.mktemp("model"))


def test_a_warm_up_changes_nothing(world: World) -> None:
    world.model.warm_up()
    assert world.bench().run([world.ask(ONE)])[ONE, 0] == world.expected[ONE]


def test_a_tower_cut_into_the_smallest_stages_gives_the_same(world: World) -> None:
    whole = world.model
    cut = VisionLanguageModel(whole.inner, whole.family, whole.merge, lambda: Pace(0, 1300, 100))
    told = world.told[ONE]
    span = told.spans[0]
    tokens = told.prompt[span.start : span.start + span.length]
    pixels = {name: _array(t) for name, t in world.album[span.digest].tensors.items()}
    given = cut.encode(tokens, pixels)
    assert len(given.stages) > len(whole.encode(tokens, pixels).stages)
    while not given.run(1):
        pass
    expected = whole.encode(tokens, pixels)
    expected.run(0)
    for one, other in zip(given.features.arrays, expected.features.arrays, strict=True):
        assert mx.allclose(one, other, rtol=1e-5, atol=1e-6)
    bench = Eyes(cut, world.album)
    assert bench.run([world.ask(THREE)])[THREE, 0] == world.expected[THREE]
    assert mx.fast.scaled_dot_product_attention is _attention


def test_a_tower_that_fails_midway_leaves_attention_as_it_was(world: World) -> None:
    with pytest.raises(Exception):  # noqa: B017 - whatever the tower says
        world.model.encode([1], {"pixel_values": mx.zeros((3, 1, 2))})
    assert mx.fast.scaled_dot_product_attention is _attention
    assert world.bench().run([world.ask(ONE)])[ONE, 0] == world.expected[ONE]


@pytest.mark.parametrize("which", [PLAIN, ONE, EARLIER, THREE])
def test_alone_it_equals_mlx_vlm(world: World, which: int) -> None:
    bench = world.bench()
    assert bench.run([world.ask(which)])[which, 0] == world.expected[which], bench.failed


def test_text_is_what_the_text_tower_gives_by_itself(world: World) -> None:
    made = list(world.told[PLAIN].prompt)
    for _ in range(COUNT):
        world.forget()
        logits = world.model.inner.language_model(mx.array([made])).logits
        made.append(int(mx.argmax(logits[0, -1])))
    bench = world.bench()
    assert bench.run([world.ask(PLAIN)])[PLAIN, 0] == made[-COUNT:]


@pytest.mark.parametrize(
    "how",
    [
        {"prefill_chunk": 7, "max_running": 3},
        {"pipelined": True, "recurring": True, "max_running": 8},
        {"speculate": 3},
        {"cache": 1 << 30, "prefill_chunk": 5},
    ],
    ids=["chunks", "pipelined", "drafts", "cache"],
)
def test_rows_of_both_kinds_that_come_and_go_equal_those_alone(
    world: World, how: dict[str, Any]
) -> None:
    bench = world.bench(**how)
    order = [PLAIN, THREE, ONE, EARLIER, ONE, PLAIN, THREE]
    for id, which in enumerate(order):
        bench.put(world.ask(which, id, count=COUNT - id % 3), turns=2)
    bench.drain()
    for id, which in enumerate(order):
        assert bench.generated[id, 0] == world.expected[which][: COUNT - id % 3], (id, bench.failed)
    assert bench.encoded == 3


def test_what_the_cache_has_is_neither_run_nor_seen_again(world: World) -> None:
    bench = world.bench(cache=1 << 30)
    for id, which in enumerate([THREE, THREE, ONE, ONE]):
        assert bench.run([world.ask(which, id)])[id, 0] == world.expected[which]
    assert bench.encoded == 3
    assert (bench.found_features, bench.skipped) == (1, 4)
    for id in (1, 3):
        assert bench.found[id].cached == bench.found[id].total - 1


def test_the_same_text_with_another_picture_is_another_prompt(world: World) -> None:
    bench = world.bench(cache=1 << 30)
    seen: list[list[float]] = []
    for id, image in enumerate([picture(56, 56, 5), picture(56, 56, 6), picture(56, 56, 5)]):
        told = world.reader.read("a picture {} of", image)
        bench.album |= told.pictures
        request = Submit(id, told.prompt, [Choice(0, 0)], 3, GREEDY, media=told.spans, logprobs=0)
        assert bench.run([request])[id, 0] == world.oracle(told, 3)
        seen.append([each.logprob for each in bench.logprobs[id, 0]])
    assert bench.found[1].cached <= told.spans[0].start
    assert bench.found[2].cached == len(told.prompt) - 1
    assert seen[0] != seen[1] and seen[0] == pytest.approx(seen[2], abs=1e-4)


def test_a_conversation_about_one_picture_sees_it_once_and_runs_only_what_is_new(
    world: World,
) -> None:
    bench = world.bench(cache=1 << 30)
    text = "look {} at this"
    for turn in range(10):
        told = world.reader.read(text, picture(90, 60, 7))
        bench.album |= told.pictures
        request = Submit(turn, told.prompt, [Choice(0, 0)], 2, GREEDY, media=told.spans)
        bench.run([request])
        if turn:
            new = len(f" and {turn}")
            assert bench.found[turn].cached >= len(told.prompt) - new - 1
        text += f" and {turn}"
    assert bench.generated[9, 0] == world.oracle(told, 2)
    assert (bench.encoded, bench.skipped) == (1, 9)


def test_a_video_is_what_mlx_vlm_makes_of_its_frames(world: World) -> None:
    if not world.model.family.moving:
        return
    data = animated("WEBP", [painted(64, 48, seed=n) for n in range(30)])
    request, expected = world.film(data)
    assert request.media[0].grid[0] > 1
    bench = world.bench(prefill_chunk=7)
    bench.put(world.ask(ONE, 1))
    assert bench.run([request])[9, 0] == expected, bench.failed


def test_resumed_equals_undisturbed(world: World) -> None:
    bench = world.bench()
    for id, which in enumerate([ONE, THREE, PLAIN]):
        made = world.expected[which][:3]
        bench.put(world.ask(which, id, choices=[Choice(0, 0, made)]))
    bench.turn()
    bench.drain()
    for id, which in enumerate([ONE, THREE, PLAIN]):
        assert bench.generated[id, 0] == world.expected[which][3:]


def test_choices_share_one_prompt(world: World) -> None:
    bench = world.bench()
    bench.run([world.ask(THREE, 1, choices=[Choice(i, i) for i in range(3)])])
    assert [bench.generated[1, i] for i in range(3)] == [world.expected[THREE]] * 3
    assert bench.encoded == 3
