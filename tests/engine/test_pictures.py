"""Pictures in requests, whatever the family: asked for when they are needed, encoded between steps, given
up when room is short, and nobody's business but their own requests'."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
from engine.harness import Bench
from engine.vision_world import COUNT, EARLIER, GREEDY, ONE, PLAIN, THREE, World
from tiny import build

from millrace.cache.disk import DiskTier
from millrace.engine.pictures import keys_of
from millrace.engine.turn import EncodePicture, Outcome, Pass, Seen, decoder
from millrace.protocol import Abort, Choice, Picture, Span, Submit, Tensor, encoder, to_engine
from millrace.protocol.prefixes import CacheQuery


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World("qwen3_vl", tmp_path_factory.mktemp("qwen3_vl"))


def test_a_text_model_refuses_a_picture_and_serves_the_others() -> None:
    bench = Bench(build("llama"))
    seen = Submit(1, [1, 2, 2, 3], [Choice(0, 0)], 4, GREEDY, media=[Span(1, 2, "ab")])
    bench.put(Picture("ab", {"pixel_values": Tensor("float32", (1,), b"\0\0\0\0")}))
    bench.run([seen, Submit(2, [1, 2, 3], [Choice(0, 0)], 4, GREEDY)])
    assert bench.failed[1].code == "invalid_request"
    assert "takes text only" in bench.failed[1].message
    assert len(bench.generated[2, 0]) == 4 and (1, 0) not in bench.generated


def test_pictures_and_their_places_cross_as_they_are() -> None:
    picture = Picture("ab", {"image_grid_thw": Tensor("int64", (1, 3), bytes(24))})
    request = Submit(7, [1, 2, 2, 3], [Choice(0, 0)], 4, media=[Span(1, 2, "ab", (1, 4, 2))])
    for message in (picture, request):
        assert to_engine.decode(encoder.encode(message)) == message


def test_a_picture_is_encoded_in_parts_between_the_steps_of_others(world: World) -> None:
    bench = world.bench()
    bench.put(world.ask(PLAIN, 0, count=2000), turns=4)
    bench.put(world.ask(THREE, 1))
    while len(bench.generated.get((1, 0), [])) < COUNT:
        bench.turn()
    bench.put(Abort(0))
    bench.drain()
    assert bench.generated[1, 0] == world.expected[THREE]
    turns = [decoder.decode(turn).operations for _, turn in bench.journal]
    seeing = [[o for o in turn if isinstance(o, EncodePicture)] for turn in turns]
    assert sum(map(len, seeing)) > 3 and max(map(len, seeing)) == 1
    for turn, seen in zip(turns, seeing, strict=True):
        if seen:
            (step,) = (o for o in turn if isinstance(o, Pass))
            assert step.rows and not step.prompts
    before: dict[str, int] = {}
    for operation in (o for seen in seeing for o in seen):
        # What a stage takes is known from the ones before, which may have been others.
        assert 1 <= operation.parts <= 2 * before.get(operation.digest, 1)
        before[operation.digest] = operation.parts


def test_turns_with_pictures_replay_in_a_second_engine(world: World) -> None:
    first, second = (world.bench(cache=1 << 30, prefill_chunk=16) for _ in range(2))
    for id, which in enumerate([PLAIN, THREE, ONE, THREE]):
        first.put(world.ask(which, id), turns=3)
    first.drain()
    engine, outcome = second.engine, Outcome()
    pictures = msgspec.msgpack.Decoder(list[Picture])
    for (raw, turn), pixels in zip(first.journal, first.pixels, strict=True):
        seen, recorded = msgspec.msgpack.decode(raw, type=Seen), decoder.decode(turn)
        for picture in pictures.decode(pixels):
            engine._vision_inputs.arrived(picture)
        # What took how long is the first engine's; all else is the second one's own.
        outcome.gap, outcome.pass_seconds = seen.outcome.gap, seen.outcome.pass_seconds
        for mine, its in zip(outcome.pictures, seen.outcome.pictures, strict=True):
            mine.seconds = its.seconds
        seen.outcome = outcome
        assert engine._decider.decide(seen) == recorded
        outcome = engine._executor.execute(recorded, second._deliver)
    assert second.generated == first.generated
    assert second.generated[1, 0] == world.expected[THREE]


def test_no_more_is_kept_than_there_is_room_for(world: World) -> None:
    bench = world.bench(picture_room=0)
    bench.run([world.ask(which, which) for which in (THREE, ONE, EARLIER)])
    for which in (THREE, ONE, EARLIER):
        assert bench.generated[which, 0] == world.expected[which]
    assert bench.encoded == len(bench.wanted) >= 3
    bench.run([world.ask(PLAIN, 9)])
    assert not bench.held


def test_clearing_the_cache_clears_features_too(world: World) -> None:
    bench = world.bench(cache=1 << 26)
    bench.run([world.ask(THREE)])
    assert len(bench.held) == 3
    bench.put(CacheQuery("q", clear=True), turns=1)
    assert not bench.held
    assert bench.run([world.ask(ONE)])[ONE, 0] == world.expected[ONE]


def test_a_picture_is_asked_for_again_when_who_asked_first_has_gone(world: World) -> None:
    bench = world.bench()
    album, bench.album = bench.album, {}
    bench.put(world.ask(ONE, 1), turns=3)
    bench.put(world.ask(ONE, 2), turns=3)
    assert len(bench.wanted) == 1
    bench.album = album
    bench.put(Abort(1), turns=1)
    bench.drain()
    assert bench.generated[2, 0] == world.expected[ONE]
    assert len(bench.wanted) == 2 and (1, 0) not in bench.generated


def test_others_go_on_while_a_picture_does_not_come(world: World) -> None:
    bench = world.bench()
    album, bench.album = bench.album, {}
    bench.put(world.ask(THREE, 1), turns=2)
    bench.put(world.ask(PLAIN, 2))
    while (2, 0) not in bench.finish:
        bench.turn()
    bench.turn()
    assert bench.engine._decider.stuck and not bench.idle
    for digest in [*bench.wanted]:
        bench.transport.put(album[digest])
    bench.album = album
    bench.drain()
    assert bench.generated[1, 0] == world.expected[THREE]


@pytest.mark.parametrize("how", ["short", "other", "shape", "type", "none"])
def test_a_broken_picture_fails_its_requests_alone(world: World, how: str) -> None:
    bench = world.bench()
    digest = world.told[ONE].spans[0].digest
    tensors = dict(world.album[digest].tensors)
    pixels = tensors["pixel_values"]
    tensors["pixel_values"] = {
        "short": Tensor(pixels.dtype, pixels.shape, pixels.data[:-8]),
        "other": Tensor(pixels.dtype, (4, pixels.shape[1]), pixels.data[: 16 * pixels.shape[1]]),
        "shape": Tensor(pixels.dtype, (3, 5), pixels.data),
        "type": Tensor("object", pixels.shape, pixels.data),
        "none": pixels,
    }[how]
    if how == "none":
        tensors = {}
    bench.album = {**bench.album, digest: Picture(digest, tensors)}
    bench.run([world.ask(which, which) for which in (ONE, THREE, EARLIER, PLAIN)])
    for which in (ONE, THREE):
        assert "picture could not be read" in bench.failed[which].message
    for which in (EARLIER, PLAIN):
        assert bench.generated[which, 0] == world.expected[which]


@pytest.mark.parametrize(
    "spans",
    [
        [Span(0, 0, "a", (1, 2, 2))],
        [Span(2, 1, "a", (1, 2, 2)), Span(2, 1, "b", (1, 2, 2))],
        [Span(-1, 1, "a", (1, 2, 2))],
        [Span(1 << 40, 1, "a", (1, 2, 2))],
        [Span(9, 1, "a", (1, 2, 2))],
        [Span(1, 1 << 50, "a", (1, 2, 2))],
        [Span(1, 4, "a")],
        [Span(1, 4, "a", (1, 2, 2))],
    ],
)
def test_places_that_cannot_be_are_refused(world: World, spans: list[Span]) -> None:
    bench = world.bench()
    bad = Submit(1, [5] * 10, [Choice(0, 0)], 4, GREEDY, media=spans)
    bench.run([bad, world.ask(PLAIN, 2)])
    assert bench.failed[1].code == "invalid_request"
    assert bench.generated[2, 0] == world.expected[PLAIN]


def test_aborts_at_any_time_leave_nothing_behind(world: World) -> None:
    dice = random.Random(7)
    bench = world.bench(picture_room=0, prefill_chunk=6, cache=1 << 20)
    alive: list[int] = []
    for id in range(40):
        bench.put(world.ask(dice.randrange(4), id, count=4), turns=dice.randrange(4))
        alive.append(id)
        if dice.random() < 0.6:
            bench.put(Abort(alive.pop(dice.randrange(len(alive)))))
    bench.drain()
    bench.put(Abort(999), turns=1)
    assert not bench.failed and not bench.held
    assert bench.engine._decider.held == 0


def test_rows_that_had_to_leave_come_back_with_their_pictures(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = world.bench(picture_room=0)
    for id, which in enumerate((THREE, ONE, EARLIER)):
        bench.put(world.ask(which, id, count=60))
    while bench.engine._decider.running < 2:
        bench.turn()
    runner = bench.engine._executor._runner
    run, faults = runner.run, [RuntimeError("once")]

    def fails_once(*given: Any) -> Any:
        if faults:
            raise faults.pop()
        return run(*given)

    monkeypatch.setattr(runner, "run", fails_once)
    bench.drain()
    assert not faults and not bench.failed
    for id, which in enumerate((THREE, ONE, EARLIER)):
        assert bench.generated[id, 0][:COUNT] == world.expected[which]


def test_state_on_disk_needs_no_pixels_after_a_restart(world: World, tmp_path: Path) -> None:
    first = world.bench(cache=1 << 26, disk=DiskTier(tmp_path, "same", 1 << 30))
    assert first.run([world.ask(THREE)])[THREE, 0] == world.expected[THREE]
    first.engine._close()
    second = world.bench(cache=1 << 26, disk=DiskTier(tmp_path, "same", 1 << 30))
    assert second.run([world.ask(THREE)])[THREE, 0] == world.expected[THREE]
    assert second.found[THREE].hit == "disk"
    assert not second.wanted and (second.encoded, second.skipped) == (0, 3)


def test_keys_are_outside_every_vocabulary_and_tell_pictures_and_sizes_apart() -> None:
    def keys(*spans: Span) -> list[int]:
        return keys_of(Submit(1, list(range(9)), [], 1, media=list(spans)))

    plain = keys()
    one = keys(Span(2, 3, "a"))
    assert plain == list(range(9)) and one[:2] == [0, 1] and one[5:] == [5, 6, 7, 8]
    assert all(1 << 62 <= key < 1 << 63 for key in one[2:5]) and len(set(one[2:5])) == 3
    assert keys(Span(2, 3, "a")) == one
    assert not set(one[2:5]) & set(keys(Span(2, 3, "b"))[2:5])
    assert not set(one[2:5]) & set(keys(Span(2, 3, "a", (1, 2, 6)))[2:5])
    assert keys(Span(4, 3, "a"))[4:7] == one[2:5]


def test_prompt_logprobs_are_told_of_prompts_with_pictures(world: World) -> None:
    bench = world.bench(cache=1 << 26)
    asked: dict[str, Any] = {"prompt_logprobs": 0}
    bench.run([msgspec.structs.replace(world.ask(ONE, id), **asked) for id in (1, 2)])
    length = len(world.told[ONE].prompt)
    assert [len(bench.prompt_logprobs[id]) for id in (1, 2)] == [length - 1] * 2
    assert bench.generated[2, 0] == world.expected[ONE][:COUNT]
