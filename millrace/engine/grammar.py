"""Grammars on the engine's side: which tokens may come next, as masks over the logits.

Matchers are llguidance's. Masks are computed on the host while the device runs the forward pass;
compiled grammars are kept, and a matcher that fails fails its own row.
"""

from __future__ import annotations

import functools
from pathlib import Path

import llguidance.numpy as bits
import mlx.core as mx
import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer

from millrace.protocol import LazyGrammar, Submit

_KEPT_GRAMMARS = 128
_TAIL = 64
"""Characters of made text in which a trigger is looked for, beside the last token's."""


class Grammars:
    """Makes grammars for one model's rows."""

    def __init__(self, folder: Path, width: int) -> None:
        self._folder = folder
        self._width = width
        self._compile = functools.lru_cache(_KEPT_GRAMMARS)(self._compiled)
        self._tokenizer = functools.lru_cache(4)(self._load)

    def of(self, request: Submit, generated: list[int]) -> RowGrammar | None:
        """The grammar that a request asks for, brought to where its tokens are; None if it is free."""
        ends = tuple(request.end_ids)
        grammar: RowGrammar
        if request.grammar is not None:
            grammar = RowGrammar(self._compile(request.grammar, ends).deep_copy())
        elif request.lazy_grammar is not None:
            lazy = request.lazy_grammar
            start = self._compile(lazy.grammar, ends)
            grammar = LazyRowGrammar(lazy, start, self._tokenizer(ends))
        else:
            return None
        for token in generated:
            if problem := grammar.accept(token):
                raise ValueError(problem)
        return grammar

    def _load(self, ends: tuple[int, ...]) -> LLTokenizer:
        text = (self._folder / "tokenizer.json").read_text(encoding="utf-8")
        return LLTokenizer(text, n_vocab=self._width, eos_token=list(ends) or None)

    def _compiled(self, grammar: str, ends: tuple[int, ...]) -> LLMatcher:
        matcher = LLMatcher(self._tokenizer(ends), grammar)
        if matcher.is_error():
            raise ValueError(f"The grammar cannot be enforced: {matcher.get_error()}")
        return matcher


class RowGrammar:
    def __init__(self, matcher: LLMatcher | None) -> None:
        self.matcher = matcher

    @property
    def complete(self) -> bool:
        """Nothing can follow any more."""
        return self.matcher is not None and self.matcher.is_stopped()

    def accept(self, token: int) -> str | None:
        """Take a token; returns what is wrong, if anything is."""
        if self.matcher is None or self.matcher.is_stopped():
            return None
        if not self.matcher.consume_token(token):
            return f"The answer left its grammar: {self.matcher.get_error()}"
        return None


class LazyRowGrammar(RowGrammar):
    """Free until one of the triggers was made; then bound until what follows it is complete."""

    def __init__(self, lazy: LazyGrammar, start: LLMatcher, tokenizer: LLTokenizer) -> None:
        super().__init__(None)
        self._triggers = [t.encode() for t in lazy.triggers]
        self._start = start
        self._tokenizer = tokenizer
        self._tail = b""

    def accept(self, token: int) -> str | None:
        if self.matcher is not None:
            problem = super().accept(token)
            if problem is None and (self.matcher.is_accepting() or self.matcher.is_stopped()):
                self.matcher = None
            return problem
        piece = self._tokenizer.decode_bytes([token]).lstrip(b"\xff")
        self._tail = self._tail[-_TAIL:] + piece
        for trigger in self._triggers:
            # Only what this token completes: what was before has been looked at.
            at = self._tail.rfind(trigger)
            if at >= 0 and len(self._tail) - at - len(trigger) < len(piece):
                self._begin(self._tail[at + len(trigger) :])
                break
        return None

    def _begin(self, rest: bytes) -> None:
        self._tail = b""
        matcher = self._start.deep_copy()
        begun = self._tokenizer.tokenize_bytes(rest) if rest else []
        # A token that goes beyond the trigger in a way no call does is not the start of one.
        if not begun or matcher.validate_tokens(begun) == len(begun):
            if begun:
                matcher.consume_tokens(begun)
            self.matcher = matcher


_SHIFTS = np.arange(32, dtype=np.uint32)


@functools.cache
def _executor() -> LLExecutor:
    return LLExecutor()


def masked(logits: mx.array, grammars: list[tuple[int, RowGrammar]]) -> mx.array:
    """The logits with all tokens out that the rows' grammars do not allow."""
    bound = [(i, g.matcher) for i, g in grammars if g.matcher and not g.matcher.is_stopped()]
    if not bound:
        return logits
    width = logits.shape[-1]
    table = bits.allocate_token_bitmask(len(bound), width)
    if len(bound) == 1:
        bits.fill_next_token_bitmask(bound[0][1], table, 0)
    else:
        bits.fill_next_token_bitmask_par(
            _executor(), [(matcher, k) for k, (_, matcher) in enumerate(bound)], table
        )
    words = mx.array(table.view(np.uint32))
    allowed = (words[:, :, None] >> mx.array(_SHIFTS)) & 1
    allowed = allowed.reshape(len(bound), -1)[:, :width].astype(mx.bool_)
    at = mx.array([i for i, _ in bound], mx.int32)
    if len(bound) == logits.shape[0]:
        return mx.where(allowed, logits, -mx.inf)
    logits[at] = mx.where(allowed, logits[at], -mx.inf)
    return logits
