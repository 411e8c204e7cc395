"""Long prompts of which a draft chooses what runs: the engine turn by turn, tiny models."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tiny
from engine.harness import Bench
from mlx.utils import tree_map
from native.native_models import VOCAB, Kind

from millrace.cache.operations import Keep
from millrace.config import EngineConfig
from millrace.engine.memory import Budget
from millrace.engine.pacing import StepCost
from millrace.engine.runner import Runner
from millrace.engine.specprefill.operations import DraftCache, ScoreChunk
from millrace.engine.specprefill.selection import Kept
from millrace.engine.turn import Outcome, Pass, Seen, decoder
from millrace.models.load import load
from millrace.protocol import Abort, Choice, Sampling, Submit
from millrace.protocol.prefixes import CacheQuery
from millrace.protocol.specprefill import SparsePrefill

GEMMA = {"sliding_window": 64, "sliding_window_pattern": 2, "query_pre_attn_scalar": 64}
_seen = msgspec.msgpack.Decoder(Seen)


def _perturbed(model: Any) -> Any:
    import mlx.core as mx

    mx.random.seed(9)
    model.update(
        tree_map(lambda w: w + 0.05 * mx.random.normal(w.shape).astype(w.dtype), model.parameters())
    )
    mx.eval(model.parameters())
    return model


def _native(kind: str, **more: Any) -> tuple[Any, Any]:
    return Kind(kind, **more).native(), Kind(kind, seed=5, **more).native()


PAIRS: dict[str, Any] = {
    "llama": lambda: _native("llama"),
    "qwen3": lambda: _native("qwen3"),
    "gemma3": lambda: _native("gemma3_text", layers=4, more=GEMMA),
    "llama by MLX": lambda: (tiny.build("llama"), _perturbed(tiny.build("llama"))),
    "gemma3 by MLX": lambda: (tiny.build("gemma3_text"), _perturbed(tiny.build("gemma3_text"))),
}


@pytest.fixture(scope="module", params=list(PAIRS))
def pair(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    models: tuple[Any, Any] = PAIRS[request.param]()
    return models


@pytest.fixture(scope="module")
def llamas() -> tuple[Any, Any]:
    models: tuple[Any, Any] = PAIRS["llama"]()
    return models


def _prompt(length: int, seed: int = 1) -> list[int]:
    dice = random.Random(seed)
    return [dice.randrange(3, min(VOCAB, tiny.VOCAB)) for _ in range(length)]


def _ask(
    id: int,
    prompt: list[int],
    sparse: SparsePrefill | None,
    *,
    count: int = 6,
    choices: list[Choice] | None = None,
    **more: Any,
) -> Submit:
    sampling = more.pop("sampling", Sampling(0.0))
    choices = choices or [Choice(0, 7)]
    return Submit(id, prompt, choices, count, sampling, sparse=sparse, **more)


def test_a_share_of_one_is_the_whole_prompt(pair: tuple[Any, Any]) -> None:
    model, draft = pair
    prompt = _prompt(700)
    dense = Bench(model).run([_ask(1, prompt, None)])
    told = [(0, 40), (40, 700)]  # through positions, although nothing is left out
    asked = [
        _ask(1, prompt, SparsePrefill(1.0)),
        _ask(2, prompt, SparsePrefill(1.0, kept=told)),
    ]
    bench = Bench(model, draft=draft)
    found = bench.run(asked)
    assert found[1, 0] == found[2, 0] == dense[1, 0]
    assert not bench.selected, "there was nothing to choose"


def test_what_stays_is_told_and_answers_are_those_of_it(pair: tuple[Any, Any]) -> None:
    """The whole way, against a resume that is told the same."""
    model, draft = pair
    prompt = _prompt(1100)
    sparse = SparsePrefill(0.2, head=60, tail=1000)
    bench = Bench(model, draft=draft, cache=1 << 26, prefill_chunk=128)
    first = bench.run([_ask(1, prompt, sparse, count=8)])[1, 0]
    told = bench.selected[1]
    kept = Kept.of(told.kept, 1100)
    assert told.scored == told.run == 1100
    assert kept.ranges[0][0] == 0 and kept.exact >= 60 and kept.ranges[-1][0] <= 1100 - 512
    assert 0 < kept.dropped < 500
    assert any(s.done < s.total for s in bench.scoring)

    again = msgspec.structs.replace(sparse, kept=told.kept)
    resumed = _ask(2, prompt, again, count=8, choices=[Choice(0, 7, first[:3])])
    other = Bench(model, draft=draft)
    assert other.run([resumed])[2, 0] == first[3:]
    assert not other.selected
    dense = Bench(model).run([_ask(1, prompt, None, count=8)])[1, 0]
    assert len(first) == len(dense) == 8


def test_the_same_prompt_twice_is_cut_alike_and_found(llamas: tuple[Any, Any]) -> None:
    model, draft = llamas
    prompt = _prompt(1300)
    sparse = SparsePrefill(0.1, head=200)
    bench = Bench(model, draft=draft, cache=1 << 26)
    one = list(bench.run([_ask(1, prompt, sparse)])[1, 0])
    two = list(bench.run([_ask(2, prompt, sparse)])[2, 0])
    assert bench.selected[1].kept == bench.selected[2].kept and one == two
    exact = Kept.of(bench.selected[1].kept, 1300).exact
    assert bench.found[2].cached == exact >= 200
    assert bench.selected[2].run <= 1, "the draft has a cache of its own"
    # What is kept is exact: another prompt that goes on elsewhere is what it is without a cache.
    other = [*prompt[: exact + 40], *_prompt(30, seed=4)]
    dense = Bench(model).run([_ask(9, other, None)])[9, 0]
    assert bench.run([_ask(3, other, None)])[3, 0] == dense
    assert bench.found[3].cached == exact
    # Nor is anything else of it found by the same prompt, run whole, with what was said after it.
    other = [*prompt, *one, 5, 6]
    assert bench.run([_ask(4, other, None)])[4, 0] == Bench(model).run([_ask(4, other, None)])[4, 0]
    assert bench.found[4].cached == exact + 40
    bench.cache.check()  # type: ignore[union-attr]


def test_nothing_is_kept_after_the_first_token_that_is_left_out(pair: tuple[Any, Any]) -> None:
    model, draft = pair
    prompt = _prompt(900)
    bench = Bench(model, draft=draft, cache=1 << 26, prefill_chunk=100)
    bench.run([_ask(1, prompt, SparsePrefill(0.2), choices=[Choice(0, 1), Choice(1, 2)])])
    exact = Kept.of(bench.selected[1].kept, 900).exact
    turns = [decoder.decode(turn) for _, turn in bench.journal]
    kept = [o for turn in turns for o in turn.operations if isinstance(o, Keep)]
    assert kept and max(o.end for o in kept) == exact
    assert any(isinstance(o, DraftCache) for turn in turns for o in turn.operations)


def test_sparse_and_dense_rows_in_one_batch_are_what_they_are_alone(pair: tuple[Any, Any]) -> None:
    model, draft = pair

    native = getattr(model, "in_place", False)

    def asked() -> list[Submit]:
        # MLX's sums depend on how many rows there are: near draws may differ by that.
        return [
            _ask(
                k,
                _prompt(600 + 17 * k, seed=k),
                SparsePrefill(0.15, head=40) if k % 2 else None,
                count=24 if native else 6,
                sampling=Sampling(0.8 if k > 4 and native else 0.0),
            )
            for k in range(8)
        ]

    together = Bench(model, draft=draft, speculate=4, max_running=8).run(asked())
    for request in asked():
        alone = Bench(model, draft=draft).run([request])
        assert alone[request.id, 0] == together[request.id, 0], request.id


def test_choices_and_rows_that_give_way_keep_what_was_chosen(llamas: tuple[Any, Any]) -> None:
    model, draft = llamas
    sparse = SparsePrefill(0.1, head=40)
    prompt = _prompt(1200)

    def asked(id: int, width: int) -> Submit:
        choices = [Choice(k, 100 + k) for k in range(width)]
        return _ask(id, prompt, sparse, count=200, choices=choices, sampling=Sampling(0.9))

    roomy = Bench(model, draft=draft).run([asked(1, 3)])
    cost = Bench(model).budget.cost
    tight = Bench(
        model,
        draft=draft,
        budget=Budget(cost, cost.row(23 * cost.page)),
        cache=1 << 26,
        max_running=4,
    )
    tight.put(asked(1, 3))
    while len(tight.generated.get((1, 0), [])) < 2:
        tight.turn()
    others = [_ask(k, _prompt(500, seed=k), None, count=160, priority=1) for k in range(2, 5)]
    found = tight.run(others)
    assert [found[1, k] for k in range(3)] == [roomy[1, k] for k in range(3)]
    turns = [decoder.decode(turn) for _, turn in tight.journal]
    begun = [o for t in turns for o in t.operations if type(o).__name__ == "Begin" and o.kept]
    assert len(begun) > 1, "nobody had to begin again"
    assert len({str(o.kept) for o in begun}) == 1
    assert len([o for t in turns for o in t.operations if isinstance(o, ScoreChunk)]) < 20


def test_turns_with_a_draft_replay(llamas: tuple[Any, Any]) -> None:
    model, draft = llamas
    first, second = (
        Bench(model, draft=draft, cache=1 << 22, prefill_chunk=128, draft_cache=1 << 22)
        for _ in range(2)
    )
    dice = random.Random(3)
    heads = [_prompt(n, seed=n) for n in (50, 400)]
    for id in range(24):
        prompt = [*dice.choice(heads), *_prompt(dice.choice([20, 900, 1500]), seed=id % 7)]
        sparse = SparsePrefill(dice.choice([0.1, 0.5])) if dice.random() < 0.7 else None
        first.put(_ask(id, prompt, sparse, count=dice.randrange(1, 9)), turns=dice.randrange(9))
        if dice.random() < 0.2:
            first.put(Abort(dice.randrange(id + 1)))
    first.put(CacheQuery("x", clear=True))
    first.turn()
    first.drain()
    decider, executor = second.engine._decider, second.engine._executor
    outcome = Outcome()
    for raw, turn in first.journal:
        seen, recorded = _seen.decode(raw), decoder.decode(turn)
        outcome.gap, outcome.pass_seconds = seen.outcome.gap, seen.outcome.pass_seconds
        for mine, theirs in zip(outcome.scorings, seen.outcome.scorings, strict=True):
            mine.seconds = theirs.seconds
        seen.outcome = outcome
        assert decider.decide(seen) == recorded
        outcome = executor.execute(recorded, second._deliver)
    assert second.generated == first.generated and first.selected
    assert executor.draft_bytes == 0


def test_a_client_that_leaves_while_its_prompt_is_scored_costs_nothing_more(
    llamas: tuple[Any, Any],
) -> None:
    model, draft = llamas
    bench = Bench(model, draft=draft, prefill_chunk=128)
    bench.put(_ask(1, _prompt(3000), SparsePrefill(0.1)), turns=4)
    assert bench.engine._executor.draft_bytes > 0 and not bench.generated
    bench.put(Abort(1), turns=1)
    assert bench.idle and bench.engine._executor.draft_bytes == 0
    assert bench.run([_ask(2, _prompt(40), None)])[2, 0]


def test_a_draft_that_fails_fails_its_request_alone(
    llamas: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, draft = llamas
    bench = Bench(model, draft=draft)
    peek = Runner.peek

    def broken(self: Runner, *given: Any) -> Any:
        if self.model is draft:
            raise RuntimeError("no such layer")
        return peek(self, *given)

    monkeypatch.setattr(Runner, "peek", broken)
    bench.run([_ask(1, _prompt(1200), SparsePrefill(0.1)), _ask(2, _prompt(1200), None)])
    assert "no such layer" in bench.failed[1].message and len(bench.generated[2, 0]) == 6
    assert bench.engine._executor.draft_bytes == 0


@pytest.mark.parametrize(("least", "refused"), [(0, True), (100, False)])
def test_a_prompt_that_the_draft_has_no_room_for(
    llamas: tuple[Any, Any], least: int, refused: bool
) -> None:
    """Refused where it was asked for, run whole where the server would have liked it."""
    model, draft = llamas
    bench = Bench(model, draft=draft, draft_room=1 << 20)
    bench.run([_ask(1, _prompt(3000), SparsePrefill(0.1, least=least), count=2)])
    assert (1 in bench.failed) is refused and ((1, 0) in bench.generated) is not refused
    if refused:
        assert "specprefill false" in bench.failed[1].message


@pytest.mark.parametrize(("least", "refused"), [(0, True), (100, False)])
def test_tokens_that_the_draft_has_not(llamas: tuple[Any, Any], least: int, refused: bool) -> None:
    model, draft = llamas
    bench = Bench(model, draft=draft, draft_vocabulary=VOCAB - 1)
    prompt = [*_prompt(900), VOCAB - 1, *_prompt(100)]
    bench.run([_ask(1, prompt, SparsePrefill(0.1, least=least), count=2)])
    assert (1 in bench.failed) is refused and ((1, 0) in bench.generated) is not refused
    assert bench.run([_ask(2, _prompt(900)[:-1], SparsePrefill(0.1))])[2, 0]


def test_running_rows_keep_their_pace_while_a_prompt_is_scored(llamas: tuple[Any, Any]) -> None:
    """No turn has both a prompt's tokens and the draft's work, and each of the two gets its turns."""
    model, draft = llamas
    bench = Bench(model, draft=draft, prefill_chunk=64)
    bench.put(_ask(1, _prompt(20), None, count=200), turns=4)
    bench.put(_ask(2, _prompt(2500), SparsePrefill(0.1), count=3))
    bench.put(_ask(3, _prompt(1500, seed=8), None, count=3))
    bench.drain()
    kinds: list[str] = []
    for _, turn in bench.journal:
        operations = decoder.decode(turn).operations
        prompts = any(isinstance(o, Pass) and o.prompts for o in operations)
        scored = any(isinstance(o, ScoreChunk) for o in operations)
        assert not (prompts and scored)
        kinds += ["prompt"] * prompts + ["draft"] * scored
    assert len(bench.generated[2, 0]) == len(bench.generated[3, 0]) == 3
    first, last = kinds.index("draft"), len(kinds) - kinds[::-1].index("draft")
    assert "prompt" in kinds[first:last], "the other prompt waited for the draft"


def test_a_turn_has_one_part_of_the_drafts_work_however_little_it_takes(
    llamas: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part beside a step that was quick for once seems to take no time."""
    model, draft = llamas
    asked = _ask(2, _prompt(1500), SparsePrefill(0.1), count=3)
    alone = Bench(model, draft=draft)
    alone.run([asked])
    monkeypatch.setattr(StepCost, "seconds", lambda self, size: 0.0)
    bench = Bench(model, draft=draft, prefill_chunk=64)
    bench.put(_ask(1, _prompt(20), None, count=100), turns=4)
    bench.put(asked, turns=3)
    bench.run([_ask(3, _prompt(150, seed=8), None, count=2)])
    for _, turn in bench.journal:
        parts = [o for o in decoder.decode(turn).operations if isinstance(o, ScoreChunk)]
        assert len(parts) <= 1
    assert bench.selected[2].kept == alone.selected[2].kept
    assert bench.generated[2, 0] == alone.generated[2, 0]


def test_ranges_that_cannot_be_are_refused(llamas: tuple[Any, Any]) -> None:
    model, draft = llamas
    bench = Bench(model, draft=draft)
    bench.run([_ask(1, _prompt(900), SparsePrefill(0.5, kept=[(0, 5)]))])
    assert bench.failed[1].code == "invalid_request"


def test_a_share_of_one_is_the_whole_prompt_for_the_default_model(default_model: Path) -> None:
    model = load(EngineConfig(model=str(default_model), name="default")).model
    prompt = _prompt(560)
    told = [(0, 40), (40, 72), (72, 560)]
    bench = Bench(model, draft=model, prefill_chunk=256, cache=1 << 28)
    dense = bench.run([_ask(1, prompt, None, count=12)])[1, 0]
    asked = [
        _ask(2, prompt, SparsePrefill(1.0), count=12),
        _ask(3, prompt, SparsePrefill(1.0, kept=told), count=12, cache_salt="apart"),
    ]
    found = bench.run(asked)
    assert found[2, 0] == found[3, 0] == dense
