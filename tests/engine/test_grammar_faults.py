"""Grammars in the engine: compiled off its thread, and a row's fault is that row's alone."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from llguidance import LLMatcher

from millrace.engine.grammar import Grammars, RowGrammar, masked
from millrace.engine.matching import GrammarFault, compiled, guarded, load_tokenizer
from millrace.protocol import Choice, LazyGrammar, Submit
from millrace.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(default_model: Path) -> Tokenizer:
    return Tokenizer(default_model)


@pytest.fixture(scope="module")
def grammars(default_model: Path, tokenizer: Tokenizer) -> Grammars:
    return Grammars(default_model, len(tokenizer.vocabulary))


def lark(text: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": text}]})


def asked(tokenizer: Tokenizer, grammar: str | None, *generated: list[int], **more: Any) -> Submit:
    choices = [Choice(i, 0, list(g)) for i, g in enumerate(generated or ([],))]
    ends = sorted(tokenizer.eos_ids)
    return Submit(1, [1], choices, 100, grammar=grammar, end_ids=ends, **more)


def test_a_grammar_is_compiled_while_the_engine_does_other_things(
    grammars: Grammars, tokenizer: Tokenizer
) -> None:
    here = threading.get_ident()
    compiled_in: list[int] = []
    whole = grammars._matcher

    def watched(key: Any) -> LLMatcher:
        compiled_in.append(threading.get_ident())
        return whole(key)

    grammars._matcher = watched  # type: ignore[method-assign]
    try:
        pending = grammars.begin(asked(tokenizer, lark('start: "one" | "other"\n')))
        (row,) = pending.result()
    finally:
        del grammars._matcher  # type: ignore[method-assign]
    assert row is not None and row.binding and pending.done
    assert compiled_in and here not in compiled_in


def test_a_known_grammar_is_there_at_once(grammars: Grammars, tokenizer: Tokenizer) -> None:
    request = asked(tokenizer, lark('start: "again"\n'), [], [])
    first = grammars.begin(request).result()
    pending = grammars.begin(request)
    assert pending.done
    assert len(first) == len(pending.result()) == 2


def test_a_free_request_waits_for_nothing(grammars: Grammars, tokenizer: Tokenizer) -> None:
    pending = grammars.begin(asked(tokenizer, None, [], []))
    assert pending.done and pending.result() == [None, None]


def test_choices_are_brought_to_where_their_tokens_are(
    grammars: Grammars, tokenizer: Tokenizer
) -> None:
    tokens = tokenizer.encode("yes")
    rows = grammars.begin(asked(tokenizer, lark('start: "yes"\n'), [], tokens)).result()
    assert rows[0] is not None and not rows[0].complete
    assert rows[1] is not None and rows[1].complete


@pytest.mark.parametrize(
    "grammar",
    [
        lark("start: /(/\n"),
        "not even JSON",
        json.dumps({"grammars": [{"json_schema": {"type": "object", "required": "😀" * 200}}]}),
    ],
)
def test_a_grammar_that_cannot_be_compiled_is_a_fault_of_its_request(
    grammars: Grammars, tokenizer: Tokenizer, grammar: str
) -> None:
    pending = grammars.begin(asked(tokenizer, grammar))
    with pytest.raises(GrammarFault, match="cannot be enforced"):
        pending.result()
    with pytest.raises(GrammarFault):
        grammars.of(asked(tokenizer, grammar), [])
    lazy = LazyGrammar(["<"], grammar)
    with pytest.raises(GrammarFault):
        grammars.begin(asked(tokenizer, None, lazy_grammar=lazy)).result()
    assert grammars.begin(asked(tokenizer, lark('start: "on"\n'))).result()


class Broken:
    """A matcher that fails when its mask is asked for."""

    def is_stopped(self) -> bool:
        return False

    def is_error(self) -> bool:
        return False

    def unsafe_compute_mask_ptr(self, *_: Any) -> None:
        raise RuntimeError("broken")


def test_a_failing_mask_is_its_own_rows_problem(grammars: Grammars, tokenizer: Tokenizer) -> None:
    width = len(tokenizer.vocabulary)
    request = asked(tokenizer, lark('start: "yes"\n'), [], [])
    one, two = (row for row in grammars.begin(request).result() if row)
    broken = RowGrammar(Broken())  # type: ignore[arg-type]
    logits = masked(mx.zeros((4, width)), [(0, one), (2, broken), (3, two)])
    finite = mx.isfinite(logits).sum(axis=1).tolist()
    assert finite[1] == finite[2] == width
    assert 0 < finite[0] == finite[3] < width
    assert one.problem is None and two.problem is None
    assert broken.problem is not None and "broken" in broken.problem
    assert broken.accept(1) == broken.problem and not broken.complete


def test_a_grammar_that_gives_up_in_the_middle_is_no_complete_answer(
    grammars: Grammars, tokenizer: Tokenizer
) -> None:
    words = " | ".join(json.dumps(f"item {i} of many") for i in range(5000))
    row = grammars.of(asked(tokenizer, lark(f"start: {words}\n")), [])
    assert row is not None
    problem = row.accept(tokenizer.encode("item")[0])
    assert problem is not None and "items" in problem
    assert not row.complete and not row.binding


def test_panics_are_faults_and_other_exceptions_pass(default_model: Path) -> None:
    panicking = json.dumps({"grammars": [{"json_schema": {"required": "😀" * 200}}]})
    with pytest.raises(GrammarFault):
        guarded(lambda: LLMatcher.validate_grammar_with_warnings(panicking, None))
    with pytest.raises(KeyboardInterrupt):
        guarded(lambda: (_ for _ in ()).throw(KeyboardInterrupt()))
    assert compiled(load_tokenizer(default_model), lark('start: "a"\n'))


def test_a_callers_slow_grammars_leave_a_thread_for_others(
    default_model: Path, tokenizer: Tokenizer
) -> None:
    own = Grammars(default_model, len(tokenizer.vocabulary))
    go_on, seen, whole = threading.Event(), list[str](), own._matcher

    def slow(key: Any) -> LLMatcher:
        seen.append(key[0])
        if "slow" in key[0]:
            assert go_on.wait(60)
        return whole(key)

    own._matcher = slow  # type: ignore[method-assign]
    texts = [lark(f'start: "slow{i}"\n') for i in range(6)]
    crowd = [own.begin(asked(tokenizer, text, caller="a")) for text in texts]
    alone = own.begin(asked(tokenizer, lark('start: "quick"\n'), caller="b"))
    assert alone.result()[0] is not None
    assert not any(pending.done for pending in crowd)
    crowd[5].abandon()  # its request is gone
    go_on.set()
    for pending in crowd[:5]:
        pending.result()
    assert texts[5] not in seen
