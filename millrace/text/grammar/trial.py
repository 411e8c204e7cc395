"""Trying a grammar before a request with it is taken: compiled, and followed for a few tokens.

What the engine would stumble over in the middle of an answer is refused here, with a reason.
"""

from __future__ import annotations

import contextvars
import functools
import threading
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path

from llguidance import LLMatcher, LLTokenizer

from millrace.engine.matching import GrammarFault, check, compiled, guarded, load_tokenizer
from millrace.errors import BadRequest, ModelError
from millrace.fair_gate import FairGate
from millrace.text.grammar.lark import refuse_long

PATIENCE = 10.0
"""Seconds of work that one may take to compile and begin."""
_STARVED = 4
"""How many times as long where others have the cores."""
_LOOK = 0.25
_STEPS = 3
_REMEMBERED = 256
_AT_ONCE = 2
"""Grammars of one caller that are tried at a time; one more place is for other callers."""
_BYTES_PER_SECOND = 25_000
"""About how much of a large schema compiles; it orders the queue and decides nothing else."""


class GrammarTrial:
    """Tries grammars with one model's vocabulary, and remembers those that passed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._passed: dict[str, None] = {}
        self._lock = threading.Lock()
        self._gate = FairGate(_AT_ONCE + 1, per_caller=_AT_ONCE, work="to have a grammar compiled")
        self.overran = False
        """A compilation was given up, and may still be burning time in this process."""

    @functools.cached_property
    def tokenizer(self) -> LLTokenizer:
        with self._lock:
            file = self._folder / "tokenizer.json"
            try:
                return load_tokenizer(self._folder)
            except (OSError, ValueError) as error:
                raise ModelError(f"{file} cannot be used for structured output: {error}") from error

    @functools.cached_property
    def _missing_bytes(self) -> frozenset[int]:
        """Bytes that no token of the vocabulary spells: some vocabularies lack those of rare characters."""
        known = self.tokenizer
        spelled = (
            (b, known.decode_bytes(known.tokenize_bytes(bytes([b])))) for b in range(128, 256)
        )
        return frozenset(b for b, found in spelled if found != bytes([b]))

    def check_spelling(self, texts: Iterable[str], param: str | None = None) -> None:
        """Raise a BadRequest for a text that an answer must have and the vocabulary cannot spell."""
        for text in texts:
            for character in set(text):
                if character > "\x7f" and not self._missing_bytes.isdisjoint(
                    character.encode(errors="surrogatepass")
                ):
                    raise BadRequest(
                        f"This model's vocabulary cannot spell the character {character!a}, which the "
                        "answer would have to have.",
                        param=param,
                    )

    def check(self, grammar: str, param: str | None = None) -> str:
        """The grammar itself, or a BadRequest that says why it cannot be used."""
        if grammar in self._passed:
            return grammar
        refuse_long(len(grammar), param)
        problem = self._tried(grammar)
        if problem is not None:
            raise BadRequest(f"The grammar of the answer cannot be used: {problem}.", param=param)
        self._passed[grammar] = None
        while len(self._passed) > _REMEMBERED:
            self._passed.pop(next(iter(self._passed)), None)
        return grammar

    def _tried(self, grammar: str) -> str | None:
        """What is wrong with a grammar; None if nothing is."""
        trial = _Trial(self.tokenizer, grammar)
        # The library cannot be interrupted, and does not hold the interpreter's lock. The place is
        # held until the thread ends, so a caller has a bounded number of threads that were given up.
        place = self._gate.place(len(grammar) / _BYTES_PER_SECOND)
        place.__enter__()
        work = threading.Thread(
            target=contextvars.copy_context().run, args=(trial.run, place), daemon=True
        )
        work.start()
        begun, worked = time.monotonic(), time.process_time()
        while work.is_alive() and time.monotonic() - begun < _STARVED * PATIENCE:
            work.join(_LOOK)
            if min(time.monotonic() - begun, time.process_time() - worked) >= PATIENCE:
                break
        if not trial.done:
            self.overran = work.is_alive()
            return f"it takes more than {PATIENCE:g} s to compile"
        return trial.problem


class _Trial:
    """One grammar's trial, in a thread of its own."""

    def __init__(self, tokenizer: LLTokenizer, grammar: str) -> None:
        self._tokenizer = tokenizer
        self._grammar = grammar
        self.problem: str | None = None
        self.done = False

    def run(self, place: AbstractContextManager[None]) -> None:
        """Try it, then give its place in the queue back."""
        try:
            self.problem = _walk(self._tokenizer, self._grammar)
            self.done = True
        finally:
            place.__exit__(None, None, None)


def _walk(tokenizer: LLTokenizer, grammar: str) -> str | None:
    """What goes wrong within the first tokens; None if nothing does."""
    try:
        matcher = compiled(tokenizer, grammar)
        for _ in range(_STEPS):
            token = _first_allowed(matcher)
            if token is None or matcher.is_stopped():
                return None
            matcher.consume_token(token)
            check(matcher)
    except GrammarFault as fault:
        return _explained(str(fault))
    return None


def _first_allowed(matcher: LLMatcher) -> int | None:
    mask: bytes = guarded(matcher.compute_bitmask)
    check(matcher)
    byte = next((i for i, value in enumerate(mask) if value), None)
    if byte is None:
        raise GrammarFault("it allows no token at all")
    value = mask[byte]
    return byte * 8 + (value & -value).bit_length() - 1


def _explained(fault: str) -> str:
    if "items; max is" in fault:
        return (
            "it has too many alternatives at one place: 2000 are allowed, and more only as a list "
            "of choices"
        )
    if "too many expressions" in fault or "too big" in fault:
        return "it is too complex: its regular expressions or repetitions grow too large"
    if fault == "NoExtensionBias":
        return "nothing that is finite satisfies it"
    return fault
