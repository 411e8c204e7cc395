"""A recorded list of turns replays: the same decisions from the same readings, the same tokens from the
same turns, and the same books at the end.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tiny_tokenizer
from engine.harness import Bench
from mlx_lm.models import llama
from tiny_tokenizer import WORDS

from millrace.engine.grammar import Grammars
from millrace.engine.memory import Budget
from millrace.engine.speculation import Speculation
from millrace.engine.turn import Begin, Drop, Outcome, Pass, Seen, Turn, decoder
from millrace.protocol import Abort, AbortChoice, Choice, Sampling, Submit

REQUESTS = 180
_seen = msgspec.msgpack.Decoder(Seen)


class _Eager(Speculation):
    """Tries whatever it can, right or wrong."""

    def _counts(self, rows: Any, drafters: Any, planned: Any, most: Any) -> list[int]:
        return [len(d.draft.tokens) if d is not None else 0 for d in drafters]


def _bench(model: Any, folder: Path, **more: Any) -> Bench:
    bench = Bench(
        model,
        budget=Budget(Bench(model).budget.cost, 3 << 18),
        grammars=Grammars(folder, WORDS),
        cache=1 << 20,
        prefill_chunk=256,
        max_running=6,
        **more,
    )
    decider = bench.engine._decider
    if decider._speculation is not None:
        decider._speculation = _Eager(4, decider._pacing)
    return bench


def _request(dice: random.Random, id: int, heads: list[list[int]]) -> Submit:
    head = dice.choice(heads) if dice.random() < 0.6 else []
    size = dice.randrange(1, dice.choice([60, 90, 250]))
    prompt = [*head, *(dice.randrange(3, WORDS) for _ in range(size))]
    if dice.random() < 0.3:
        prompt = [*prompt, *prompt[-20:], *prompt[-20:]]
    sampling = Sampling(
        temperature=dice.choice([0.0, 0.0, 0.8]),
        top_p=dice.choice([1.0, 0.9]),
        repetition_penalty=dice.choice([1.0, 1.0, 1.2]),
    )
    grammar = None
    if dice.random() < 0.15:
        text = 'start: "yes" | "no" | /[a-f]{3,9}/'
        grammar = json.dumps({"grammars": [{"lark_grammar": text}]})
    return Submit(
        id,
        prompt,
        [Choice(k, dice.randrange(1 << 40)) for k in range(dice.choice([1, 1, 1, 2, 4]))],
        dice.randrange(1, 40),
        sampling,
        priority=dice.choice([0, 0, 0, 1, -1]),
        logprobs=dice.choice([None, None, 2]),
        grammar=grammar,
        end_ids=[2],
    )


def _record(bench: Bench) -> None:
    dice = random.Random(11)
    heads = [[dice.randrange(3, WORDS) for _ in range(n)] for n in (40, 150, 400)]
    for id in range(REQUESTS):
        bench.put(_request(dice, id, heads), turns=dice.randrange(6))
        if dice.random() < 0.1:
            gone = dice.randrange(max(0, id - 5), id + 1)
            bench.put(dice.choice([Abort(gone), AbortChoice(gone, 0)]))
    bench.turn()
    bench.drain()
    # However fast this machine is, these outgrow the memory together.
    for id in range(REQUESTS, REQUESTS + 4):
        prompt = [dice.randrange(3, WORDS) for _ in range(340)]
        bench.put(Submit(id, prompt, [Choice(0, id)], 480, Sampling(0.0)))
    bench.turn()
    bench.drain()


@pytest.mark.parametrize(
    "how", [{"speculate": 4}, {"pipelined": True, "recurring": True}], ids=["settled", "pipelined"]
)
def test_turns_replay_in_a_second_engine(how: dict[str, Any], tmp_path: Path) -> None:
    model, folder = _model(), tiny_tokenizer.write(tmp_path)
    first, second = (_bench(model, folder, **how) for _ in range(2))
    _record(first)
    turns = [decoder.decode(turn) for _, turn in first.journal]
    _holds_all_kinds(turns, how)

    decider, executor = second.engine._decider, second.engine._executor
    outcome = Outcome()
    for (raw, _), recorded in zip(first.journal, turns, strict=True):
        seen = _seen.decode(raw)
        # The clock's readings are the first engine's; all else is the second one's own.
        outcome.gap, outcome.pass_seconds = seen.outcome.gap, seen.outcome.pass_seconds
        seen.outcome = outcome
        assert decider.decide(seen) == recorded
        outcome = executor.execute(recorded, second._deliver)

    assert second.generated == first.generated
    assert second.finish == first.finish
    assert decider.state() == first.engine._decider.state()
    assert first.cache is not None and second.cache is not None
    assert second.cache.report("") == first.cache.report("")
    second.cache.check()


def _holds_all_kinds(turns: list[Turn], how: dict[str, Any]) -> None:
    operations = [o for turn in turns for o in turn.operations]
    names = {type(o).__name__ for o in operations}
    assert {"Restore", "Keep", "Evict", "Drop", "Forget"} <= names
    passes = [o for o in operations if isinstance(o, Pass)]
    assert any(len(o.prompts) > 1 for o in passes)
    assert any(o.rows and o.prompts for o in passes)
    if "speculate" in how:
        assert any(o.drafts for o in passes)
    dropped: set[int] = set()
    returned = 0
    for operation in operations:
        if isinstance(operation, Drop):
            dropped |= set(operation.rows)
        elif isinstance(operation, Begin):
            returned += len(dropped & set(operation.rows))
    assert returned, "nobody was pre-empted"


def _model() -> Any:
    import mlx.core as mx
    from mlx.utils import tree_map

    config = llama.ModelArgs.from_dict(
        {
            "model_type": "llama",
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "intermediate_size": 64,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "rms_norm_eps": 1e-5,
            "vocab_size": WORDS,
            "tie_word_embeddings": True,
        }
    )
    mx.random.seed(3)
    model = llama.Model(config)
    model.update(
        tree_map(
            lambda w: mx.random.normal(w.shape) * (2.0 / w.shape[-1] ** 0.5) if w.ndim > 1 else w,
            model.parameters(),
        )
    )
    mx.eval(model.parameters())
    return model
