"""Grammars on the engine's side: which tokens may come next, as masks over the logits.

Matchers are llguidance's, compiled off the engine's thread (the library gives up the interpreter's
lock) and kept. Masks are computed on the host while the device runs the forward pass. A grammar that
cannot be compiled or followed is its own row's fault and nobody else's.
"""

from __future__ import annotations

import collections
import copy
import functools
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

import llguidance.numpy as bits
import mlx.core as mx
import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer

from millrace.engine.matching import GrammarFault, check, compiled, guarded, load_tokenizer
from millrace.errors import ModelError
from millrace.fair_queue import FairQueue, QueueEntry
from millrace.models.ends import end_ids
from millrace.protocol import LazyGrammar, Submit
from millrace.thread_priority import yield_to_others

_KEPT_GRAMMARS = 128
_COMPILERS = 2
"""Threads that compile one caller's grammars; one more is for other callers."""
_WAITING = 65536
"""Grammars that wait: as many as requests may, which the front has admitted."""
_BYTES_PER_SECOND = 25_000
"""About how much of a large grammar compiles; it orders the queue and decides nothing else."""
_TAIL = 64
"""Characters of made text in which a trigger is looked for, beside the last token's."""

_Key = tuple[str, tuple[int, ...]]


class PendingGrammar:
    """The grammars of a request's choices, on their way."""

    def __init__(self) -> None:
        self._settled = threading.Event()
        self._rows: list[RowGrammar | None] = []
        self._fault: BaseException | None = None
        self.on_abandon: Callable[[], None] | None = None

    def abandon(self) -> None:
        """Take it out of the queue, if it still waits: its request is gone."""
        if self.on_abandon is not None:
            self.on_abandon()

    @property
    def done(self) -> bool:
        return self._settled.is_set()

    def result(self) -> list[RowGrammar | None]:
        """One for each choice in the request's order, brought to where its tokens are, or None
        where it is free. Waits for it; raises GrammarFault where there can be none."""
        self._settled.wait()
        if self._fault is not None:
            raise self._fault
        return self._rows

    def settle(self, rows: list[RowGrammar | None]) -> None:
        self._rows = rows
        self._settled.set()

    def fail(self, fault: BaseException) -> None:
        self._fault = fault
        self._settled.set()


class Grammars:
    """Makes grammars for one model's rows."""

    def __init__(self, folder: Path, width: int) -> None:
        self._folder = folder
        self._width = width
        self._kept: collections.OrderedDict[_Key, LLMatcher] = collections.OrderedDict()
        self._tokenizers: dict[tuple[int, ...], LLTokenizer] = {}
        self._loading = threading.Lock()
        self._work: FairQueue[tuple[Submit, PendingGrammar]] = FairQueue(
            per_caller=_WAITING, total=_WAITING
        )
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        # Loading the vocabulary holds the interpreter's lock: better now than beside the first rows.
        threading.Thread(target=self._load_ahead, name="vocabulary", daemon=True).start()

    def begin(self, request: Submit) -> PendingGrammar:
        """Start making what a request asks for. What is known already is done at once."""
        pending = PendingGrammar()
        key = _key(request)
        if key is None:
            pending.settle([None] * len(request.choices))
        elif key in self._kept and not any(c.generated for c in request.choices):
            self._prepare(request, pending)
        else:
            self._enqueue(request, pending, len(key[0]))
        return pending

    def _enqueue(self, request: Submit, pending: PendingGrammar, size: int) -> None:
        with self._changed:
            entry, _ = self._work.push(
                request.caller,
                (request, pending),
                now=time.monotonic(),
                expected=size / _BYTES_PER_SECOND,
            )
            self._changed.notify()
        pending.on_abandon = lambda: self._discard(entry)
        if len(self._threads) <= _COMPILERS:
            thread = threading.Thread(target=self._compile, name="grammars", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _discard(self, entry: QueueEntry[tuple[Submit, PendingGrammar]]) -> None:
        with self._changed:
            self._work.discard(entry)

    def of(self, request: Submit, generated: list[int]) -> RowGrammar | None:
        """The grammar of one choice, waited for."""
        key = _key(request)
        return None if key is None else self._row(request, key, generated)

    def _compile(self) -> None:
        # Where cores are few, a step waits for each of its own threads that is not on one.
        yield_to_others()
        while True:
            with self._changed:
                entry = None
                while entry is None:
                    entry = self._work.pop(lambda c: self._work.running(c) < _COMPILERS)
                    if entry is None:
                        self._changed.wait()
            begun = time.monotonic()
            self._prepare(*entry.item)
            with self._changed:
                self._work.end(entry.caller, time.monotonic() - begun)
                self._changed.notify()

    def _prepare(self, request: Submit, pending: PendingGrammar) -> None:
        try:
            key = _key(request)
            assert key is not None
            pending.settle([self._row(request, key, c.generated) for c in request.choices])
        except (GrammarFault, ModelError) as fault:
            pending.fail(fault)
        except Exception as error:  # whatever it is, it is this request's, and the thread goes on
            pending.fail(GrammarFault(f"The grammar cannot be enforced: {error!r}"))

    def _row(self, request: Submit, key: _Key, generated: list[int]) -> RowGrammar:
        start, row = self._matcher(key), RowGrammar(None)
        if request.grammar is not None:
            row = RowGrammar(start.deep_copy())
        elif request.lazy_grammar is not None:
            row = LazyRowGrammar(request.lazy_grammar, start, self._tokenizer(key[1]))
        for token in generated:
            if problem := row.accept(token):
                raise GrammarFault(problem)
        return row

    def _matcher(self, key: _Key) -> LLMatcher:
        grammar, ends = key
        found = self._kept.get(key)
        if found is None:
            try:
                found = compiled(self._tokenizer(ends), grammar)
                # The first mask costs most, and copies share what it took to compute it.
                guarded(found.compute_bitmask)
                check(found)
            except GrammarFault as fault:
                raise GrammarFault(f"The grammar cannot be enforced: {fault}") from fault
            self._kept[key] = found
            while len(self._kept) > _KEPT_GRAMMARS:
                self._kept.popitem(last=False)
        return found

    def _load_ahead(self) -> None:
        try:
            self._tokenizer(tuple(sorted(end_ids(self._folder))))
        except (GrammarFault, ModelError):
            pass  # said to the first request that needs it

    def _tokenizer(self, ends: tuple[int, ...]) -> LLTokenizer:
        with self._loading:
            if ends not in self._tokenizers:
                try:
                    found = guarded(lambda: load_tokenizer(self._folder, self._width, ends))
                except OSError as error:
                    raise GrammarFault(
                        f"This model's vocabulary cannot be read: {error}"
                    ) from error
                self._tokenizers[ends] = found
            return self._tokenizers[ends]


def _key(request: Submit) -> _Key | None:
    """What is compiled for a request; None if its answer is free."""
    if request.grammar is not None:
        return request.grammar, tuple(request.end_ids)
    if request.lazy_grammar is not None:
        return request.lazy_grammar.grammar, tuple(request.end_ids)
    return None


class RowGrammar:
    def __init__(self, matcher: LLMatcher | None) -> None:
        self.matcher = matcher
        self.problem: str | None = None
        """Why the row cannot go on; what is drawn for it meanwhile means nothing."""

    def copy(self) -> Self:
        """An independent matcher in the same state."""
        new = copy.copy(self)
        if self.matcher is not None:
            new.matcher = self.matcher.deep_copy()
        return new

    @property
    def binding(self) -> bool:
        """Whether the next token must be one of some."""
        return self.problem is None and self.matcher is not None and not self.matcher.is_stopped()

    @property
    def complete(self) -> bool:
        """Nothing can follow any more."""
        stopped = self.matcher is not None and self.matcher.is_stopped()
        return stopped and self.problem is None

    def accept(self, token: int) -> str | None:
        """Take a token; returns what is wrong, if anything is."""
        if self.binding:
            matcher = self.matcher
            assert matcher is not None
            try:
                guarded(lambda: matcher.consume_token(token))
                check(matcher)
            except GrammarFault as fault:
                self.fail(f"The answer left its grammar: {fault}")
        return self.problem

    def fail(self, problem: str) -> None:
        if self.problem is None:
            self.problem = problem


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
        if self.problem is not None:
            return self.problem
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
    """The logits with all tokens out that the rows' grammars do not allow.

    A row whose grammar fails here is left as it is, and has a problem.
    """
    bound = [(i, g) for i, g in grammars if g.binding]
    if not bound:
        return logits
    table = bits.allocate_token_bitmask(len(bound), logits.shape[-1])
    _fill([g for _, g in bound], table)
    return only(logits, [i for i, _ in bound], table)


def only(logits: mx.array, rows: list[int], table: np.ndarray) -> mx.array:
    """The logits with all tokens out whose bits are not set in these rows' words."""
    words = mx.array(table.view(np.uint32))
    allowed = (words[:, :, None] >> mx.array(_SHIFTS)) & 1
    allowed = allowed.reshape(len(rows), -1)[:, : logits.shape[-1]].astype(mx.bool_)
    if len(rows) == logits.shape[0]:
        return mx.where(allowed, logits, -mx.inf)
    at = mx.array(rows, mx.int32)
    logits[at] = mx.where(allowed, logits[at], -mx.inf)
    return logits


def _fill(rows: list[RowGrammar], table: np.ndarray) -> None:
    """The bits of the tokens that may follow; all of them for a row that has a problem."""
    matchers = [row.matcher for row in rows]
    try:
        if len(rows) > 1:
            pairs = [(matcher, k) for k, matcher in enumerate(matchers)]
            guarded(lambda: bits.fill_next_token_bitmask_par(_executor(), pairs, table))
    except GrammarFault:
        alone = True  # whose fault it is shows when each is asked by itself
    else:
        alone = len(rows) == 1
    for k, row in enumerate(rows):
        matcher = matchers[k]
        assert matcher is not None
        try:
            if alone:
                guarded(functools.partial(bits.fill_next_token_bitmask, matcher, table, k))
            check(matcher)
            if not table[k].any():
                raise GrammarFault("no token of the vocabulary can follow")
        except GrammarFault as fault:
            row.fail(f"The answer cannot go on in its grammar: {fault}")
            table[k] = -1
