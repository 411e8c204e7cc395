"""What the ranks beside the first do: the same turns, with the tokens that were drawn there, to the same
state; and how they are told."""

from __future__ import annotations

import copy
import json
import random
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_tokenizer
from conftest import PATIENCE
from engine.following import Leading, follower_of
from engine.harness import Bench
from engine.vision_world import EARLIER, ONE, PLAIN, THREE, Eyes, World
from tiny_tokenizer import WORDS

from millrace.cache.store import SegmentStore
from millrace.distributed import channel as channels
from millrace.distributed.handshake import Refused
from millrace.engine.adapters import Adapters
from millrace.engine.grammar import Grammars
from millrace.engine.memory import Budget, StateCost
from millrace.engine.ranks import executors
from millrace.engine.ranks.executors import FollowingExecutor
from millrace.engine.ranks.follower import Drifted, Follower
from millrace.engine.ranks.leader import smallest
from millrace.engine.ranks.order import Close, Order, Share, checksum, encoder, from_leader
from millrace.engine.ranks.picture_features import packed
from millrace.engine.runner import Runner
from millrace.engine.sampler import Sampler
from millrace.engine.sampling import HostSampling
from millrace.engine.turn import EncodePicture, Seen, Turn
from millrace.engine.vision_inputs import VisionInputs
from millrace.models.vision.splitting import follow
from millrace.protocol import Abort, AbortChoice, Choice, Picture, Sampling, Submit


def _request(dice: random.Random, id: int, heads: list[list[int]]) -> Submit:
    prompt = [
        *dice.choice(heads),
        *(dice.randrange(3, WORDS) for _ in range(dice.randrange(1, 60))),
    ]
    grammar = None
    if dice.random() < 0.2:
        text = 'start: "yes" | "no" | /[a-f]{3,9}/'
        grammar = json.dumps({"grammars": [{"lark_grammar": text}]})
    return Submit(
        id,
        [*prompt, *prompt[-20:], *prompt[-20:]],
        [Choice(k, dice.randrange(1 << 40)) for k in range(dice.choice([1, 1, 3]))],
        dice.randrange(1, 30),
        Sampling(temperature=dice.choice([0.0, 0.9]), logit_bias={5: 3.0}),
        priority=dice.choice([0, 0, 1]),
        logprobs=dice.choice([None, 2]),
        prompt_logprobs=dice.choice([None, None, None, 1]),
        grammar=grammar,
        end_ids=[2],
        stop_ids=[2],
    )


def test_a_follower_comes_to_the_first_ranks_state_turn_by_turn(tmp_path: Path) -> None:
    tiny_tokenizer.write(tmp_path)
    model = tiny.build("llama", vocab_size=WORDS)
    first = Leading(
        model,
        budget=Budget(Bench(model).budget.cost, 3 << 18),
        grammars=Grammars(tmp_path, WORDS),
        cache=1 << 20,
        prefill_chunk=64,
        max_running=6,
        speculate=4,
        vocabulary=WORDS,
    )
    dice = random.Random(5)
    heads = [[dice.randrange(3, WORDS) for _ in range(n)] for n in (40, 150, 300)]
    for id in range(60):
        first.put(_request(dice, id, heads), turns=dice.randrange(6))
        if dice.random() < 0.2:
            gone = dice.randrange(max(0, id - 5), id + 1)
            first.put(dice.choice([Abort(gone), AbortChoice(gone, 0)]))
    # One that cannot be: its token is beyond the vocabulary.
    first.put(Submit(1000, [WORDS + 5, 1], [Choice(0, 1)], 4, Sampling(0.0)), turns=3)
    first.turn()
    first.drain()
    assert 1000 in first.failed

    follower = follower_of(model, WORDS)
    for raw in first.orders:
        assert follower.obey(from_leader.decode(raw))
    end = Close(first.engine._outcome.rows, check=checksum(first.engine.state()))
    assert not follower.obey(end)
    assert follower.checks == len(first.orders) + 1
    operations = {
        type(o).__name__ for raw in first.orders for o in from_leader.decode(raw).turn.operations
    }
    assert {"Restore", "Keep", "Evict", "Drop", "Forget", "Pass"} <= operations


class _LeadingEyes(Eyes):
    """The same for a model that sees."""

    orders: list[bytes]

    def _note(self, seen: Seen, turn: Turn, pictures: list[Picture]) -> None:
        self.orders = getattr(self, "orders", [])
        done = [p.digest for p in seen.outcome.pictures if p.done]
        shown = [packed(d, self.engine.features(d)) for d in done]
        state = checksum(self.engine.state())
        self.orders.append(encoder.encode(Order(turn, seen.outcome.rows, shown, state)))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World("qwen3_vl", tmp_path_factory.mktemp("sees"))


def test_a_picture_that_becomes_more_than_ranks_are_sent_fails_its_own_requests(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executors, "MOST_SHOWN", 100)
    told = world.told[ONE]
    span = told.spans[0]
    runner = Runner(world.model)
    vision_inputs = VisionInputs(world.model)
    made = runner, Sampler(HostSampling()), Adapters(runner.adapters, 0), vision_inputs
    executor = executors.LeadingExecutor(*made)
    vision_inputs.arrived(world.album[span.digest])
    run = told.prompt[span.start : span.start + span.length]
    turn = Turn(1, [EncodePicture(span.digest, run, [7])])
    (result,) = executor.execute(turn, lambda step: None).pictures
    assert not result.done and result.problem is not None and "ranks are sent" in result.problem
    assert result.requests == [7] and vision_inputs.features(span.digest) is None


def test_a_follower_that_has_no_vision_tower_is_shown_what_pictures_became(world: World) -> None:
    first = _LeadingEyes(copy.deepcopy(world.model), world.album, cache=1 << 24, picture_room=1)
    for which in (ONE, THREE, PLAIN, EARLIER):
        first.put(world.ask(which), turns=2)
    first.drain()
    assert first.generated[THREE, 0] == world.expected[THREE]

    model = copy.deepcopy(world.model)
    follow(model)
    assert not model.inner.vision_tower.parameters()
    runner = Runner(model)
    store = SegmentStore(runner.make_caches, runner.layout, None, runner.segments(pack=False))
    made = runner, Sampler(HostSampling()), Adapters(runner.adapters, 0), VisionInputs(model)
    follower = Follower(FollowingExecutor(*made, None, store))
    for raw in first.orders:
        assert follower.obey(from_leader.decode(raw))
    assert follower.checks == len(first.orders)
    assert any(from_leader.decode(raw).shown for raw in first.orders)


def test_a_follower_whose_state_is_another_says_so() -> None:
    model = tiny.build("llama")
    follower = follower_of(model)
    with pytest.raises(Drifted):
        follower.obey(Order(Turn(1), [], check=7))


def test_budgets_are_the_smallest_ranks() -> None:
    budget = Budget(StateCost(per_token=100), 1_000_000)
    wide = Share(1, 0, row_bytes=100 * 1024, kv_bytes=600_000, cache_bytes=90)
    # The same room for rows that are half as large holds twice as many.
    narrow = Share(2, 0, row_bytes=50 * 1024, kv_bytes=400_000, cache_bytes=90)
    assert smallest(budget, 100, [wide]) == (600_000, 90)
    assert smallest(budget, 100, [narrow]) == (800_000, 100)
    assert smallest(budget, 100, []) == (1_000_000, 100)


def test_only_who_has_the_secret_is_let_in() -> None:
    door = channels.Door(("127.0.0.1", 0), "right")
    address = door.address
    heard: list[Any] = []

    def serve() -> None:
        for _ in range(2):
            said, channel = door.next(PATIENCE)
            try:
                channels.welcome(channel, None if said.rank == 1 else "not expected")
                heard.append((said.role, said.rank, channel.receive()))
                channel.close()
            except Refused as error:
                heard.append(str(error))

    thread = threading.Thread(target=serve)
    thread.start()
    # One that says nothing keeps nobody waiting.
    silent = socket.create_connection(address)
    with pytest.raises(Refused, match="secret"):
        channels.connect(address, "wrong", "turns", 1, PATIENCE)
    with pytest.raises(Refused, match="not expected"):
        channels.connect(address, "right", "turns", 2, PATIENCE)
    for garbage in (b"GET / HTTP/1.1\r\n\r\n" + b"x" * 5000, b"\0\0\0\x08\x81\xa4type\xa1\xff"):
        with socket.create_connection(address) as stranger:
            stranger.sendall(garbage)
            stranger.settimeout(PATIENCE)
            try:
                assert stranger.recv(100) == b""
            except ConnectionResetError:
                pass
    channel = channels.connect(address, "right", "turns", 1, PATIENCE)
    channel.send(b"x" * 100_000)
    thread.join(PATIENCE)
    door.close()
    silent.close()
    assert heard == ["not expected", ("turns", 1, b"x" * 100_000)]
