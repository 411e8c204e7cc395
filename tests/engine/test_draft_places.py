"""Draft tokens of rows whose draws depend on the tokens before them.

Each place of a draft is drawn from as it would be without drafts: penalties, grammars, thinking budgets.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
import tiny_tokenizer
from engine.harness import Bench
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import build
from tiny_tokenizer import WORDS
from tokenizers import pre_tokenizers

from millrace.engine.ahead import Ahead, ahead_of
from millrace.engine.grammar import Grammars, RowGrammar
from millrace.engine.row import Row
from millrace.engine.speculation import Speculation
from millrace.protocol import Choice, LazyGrammar, Sampling, Submit, Thinking

END = 2


class _Eager(Speculation):
    """Tries whatever it can, and counts what held."""

    held = 0

    def _counts(self, rows: Any, drafters: Any, planned: Any, most: Any) -> list[int]:
        return [len(d.draft.tokens) if d is not None else 0 for d in drafters]

    def confirmed(self, row: Any, drafted: int, right: int) -> None:
        self.held += right
        super().confirmed(row, drafted, right)


@pytest.fixture(scope="module")
def model() -> Any:
    return build("llama", vocab_size=WORDS)


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> Grammars:
    return Grammars(tiny_tokenizer.write(tmp_path_factory.mktemp("tokenizer")), WORDS)


def _eager(model: Any, grammars: Grammars) -> tuple[Bench, _Eager]:
    bench = Bench(model, speculate=4, grammars=grammars)
    decider = bench.engine._decider
    decider._speculation = eager = _Eager(4, decider._pacing)
    return bench, eager


def lark(text: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": text}]})


_LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())


def _tokens(text: str) -> list[int]:
    """The tokens of visible ASCII text: each is a letter."""
    return [3 + _LETTERS.index(letter) for letter in text]


LIST = lark('start: "[" item ("," item)* "]"\nitem: "yes" | "no"\n')
PHRASE = _tokens("[yes,no,yes,no,")
OPENS, CLOSES = _tokens("<"), _tokens(">")

FEATURES: dict[str, dict[str, Any]] = {
    "repetition": {"sampling": Sampling(0.0, repetition_penalty=1.1)},
    "presence and frequency": {
        "sampling": Sampling(0.0, presence_penalty=0.3, frequency_penalty=0.05)
    },
    "bias": {"sampling": Sampling(0.0, logit_bias={7: 1.5, 9: -2.0})},
    "bad words": {"sampling": Sampling(0.0, bad_words=[[5], [6, 7], PHRASE[1:3]])},
    "least tokens": {"sampling": Sampling(0.0, min_tokens=20), "stop_ids": list(range(40, 140))},
    "grammar": {"grammar": LIST, "end_ids": [END], "stop_ids": [END]},
    "grammar, sampled": {
        "grammar": LIST,
        "end_ids": [END],
        "stop_ids": [END],
        "sampling": Sampling(1.0, top_p=0.95),
    },
    "lazy grammar": {
        "lazy_grammar": LazyGrammar(["["], lark('start: "yes" | "no,no,no"')),
        "end_ids": [END],
        "sampling": Sampling(0.0, logit_bias={PHRASE[0]: 4.0}),
    },
    "thinking": {
        "thinking": Thinking(9, True, OPENS, CLOSES, [*_tokens("so-it-is"), *CLOSES]),
    },
    "all": {
        "thinking": Thinking(9, True, OPENS, CLOSES, [*_tokens("[yes"), *CLOSES]),
        "lazy_grammar": LazyGrammar(["yes>"], LIST),
        "end_ids": [END],
        "sampling": Sampling(0.7, repetition_penalty=1.05, min_tokens=3),
    },
}


def _submits(features: list[str]) -> list[Submit]:
    dice = random.Random(7)
    submits = []
    for id in range(12):
        more = FEATURES[features[id % len(features)]]
        head = [dice.randrange(3, WORDS) for _ in range(id)]
        prompt = [*head, *PHRASE, *PHRASE[: 3 + id % 5]]
        sampling = more.get("sampling", Sampling(0.0))
        rest = {key: value for key, value in more.items() if key != "sampling"}
        choices = [Choice(0, 100 + id), Choice(1, 200 + id)][: 1 + id % 2]
        submits.append(Submit(id, prompt, choices, 60, sampling, **rest))
    return submits


def _same(model: Any, grammars: Grammars, features: list[str]) -> int:
    """That answers are those without drafts; how many draft tokens held."""
    (drafted, eager), plain = _eager(model, grammars), Bench(model, grammars=grammars)
    assert drafted.run(_submits(features), turns=1) == plain.run(_submits(features), turns=1)
    assert drafted.finish == plain.finish
    assert not drafted.failed and not plain.failed
    return eager.held


@pytest.mark.parametrize("feature", FEATURES)
def test_rows_draw_the_same_and_gain(model: Any, grammars: Grammars, feature: str) -> None:
    assert _same(model, grammars, [feature]) > 0


def test_rows_of_all_kinds_beside_one_another(model: Any, grammars: Grammars) -> None:
    assert _same(model, grammars, list(FEATURES)) > 0


def test_rows_that_report_logprobs_draft_nothing(model: Any, grammars: Grammars) -> None:
    asked = [Submit(1, [*PHRASE, *PHRASE], [Choice(0, 1)], 40, Sampling(0.0), logprobs=2)]
    (drafted, eager), plain = _eager(model, grammars), Bench(model, grammars=grammars)
    assert drafted.run(asked) == plain.run(asked)
    assert drafted.logprobs == plain.logprobs, "to the last digit"
    assert eager.held == 0


def _row(asked: Submit, grammars: Grammars, tokens: list[int]) -> Row:
    choice = Choice(0, 5, list(tokens))
    return Row.of(asked, choice, 1, grammars)


def _tables(row: Row | Ahead, wide: int = WORDS) -> object:
    """What a draw of the row depends on."""
    penalties = row.penalties
    table = None
    if penalties is not None:
        ids, factor, shift = (part.tolist() for part in penalties.table())
        changed = sorted(zip(ids, factor, shift, strict=True))
        table = changed, penalties.banned(row.generated, wide).tolist()
    matcher = row.grammar.matcher if row.grammar is not None else None
    allowed = matcher.compute_bitmask() if matcher is not None else None
    return row.generated, row.forced, table, allowed


KINDS = ["repetition", "presence and frequency", "bad words", "least tokens", "grammar", "thinking"]


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(KINDS), st.lists(st.integers(0, 14), max_size=12), st.integers(1, 6))
def test_a_row_ahead_is_the_row_after_these_tokens(
    grammars: Grammars, feature: str, picks: list[int], split: int
) -> None:
    more = dict(FEATURES[feature])
    asked = Submit(1, PHRASE, [], 60, more.pop("sampling", Sampling(0.0)), **more)
    # Tokens that repeat what stands in the phrase; of a grammar, those that it allows.
    tokens = [PHRASE[pick] for pick in picks]
    if feature == "grammar":
        tokens = PHRASE[: len(picks)]
    before, draft = tokens[:split], tokens[split:]
    row = _row(asked, grammars, before)
    untouched = _tables(row)
    for place, ahead in enumerate(ahead_of(row, draft), 1):
        assert ahead.sound
        assert _tables(ahead) == _tables(_row(asked, grammars, [*before, *draft[:place]]))
    assert _tables(row) == untouched, "the row itself has not moved"


def test_what_a_grammar_forbids_is_unsound_and_leaves_the_row_alone(grammars: Grammars) -> None:
    asked = Submit(1, PHRASE, [], 60, grammar=LIST, end_ids=[END])
    row = _row(asked, grammars, PHRASE[:1])
    assert [a.sound for a in ahead_of(row, [PHRASE[1], PHRASE[0], PHRASE[1]])] == [
        True,
        False,
        False,
    ]
    assert row.grammar is not None and row.grammar.problem is None
    assert row.grammar.accept(PHRASE[1]) is None


def test_a_place_whose_mask_fails_ends_the_draft_there(
    model: Any, grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy: Callable[[RowGrammar], RowGrammar] = RowGrammar.copy

    def failing(self: RowGrammar) -> RowGrammar:
        new = copy(self)
        new.fail("nothing can follow here")
        return new

    plain = Bench(model, grammars=grammars).run(_submits(["grammar"]), turns=1)
    monkeypatch.setattr(RowGrammar, "copy", failing)
    bench, eager = _eager(model, grammars)
    assert bench.run(_submits(["grammar"]), turns=1) == plain
    assert eager.held == 0 and not bench.failed
