"""Compiling grammars, guarded: limits on what one may cost, and a compiler's panics made errors.

Shared by the engine's rows and by the front's trial of a grammar, so that both refuse the same ones.
Knows llguidance and no MLX.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

T = TypeVar("T")


class GrammarFault(ValueError):
    """A grammar that cannot be compiled, or a matcher that cannot go on; `str` says why."""


def load_tokenizer(folder: Path, width: int | None = None, ends: Sequence[int] = ()) -> LLTokenizer:
    """Takes half a second and holds the interpreter's lock meanwhile: not while others are served."""
    text = (folder / "tokenizer.json").read_text(encoding="utf-8")
    return LLTokenizer(text, n_vocab=width, eos_token=list(ends) or None)


def guarded(call: Callable[[], T]) -> T:
    """What the library does, with its panics as faults: they are no ordinary exceptions."""
    try:
        return call()
    except (ValueError, TypeError, RuntimeError) as error:
        raise GrammarFault(_plain(str(error))) from error
    except BaseException as error:
        if type(error).__module__ != "pyo3_runtime":
            raise
        raise GrammarFault(f"the grammar compiler failed: {_plain(str(error))}") from None


def compiled(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """A matcher at the grammar's beginning. Runs without the interpreter's lock."""
    # The library's own limits bound a mask to some tens of milliseconds, as long as no fixed text of
    # great length is worked out ahead: the front's grammars ask for that to be left.
    quiet = LLParserLimits(verbose_errors=False)
    matcher = guarded(lambda: LLMatcher(tokenizer, grammar, log_level=0, limits=quiet))
    check(matcher)
    return matcher


def check(matcher: LLMatcher) -> None:
    """Raise what is wrong with a matcher, if anything is."""
    if matcher.is_error():
        raise GrammarFault(_plain(matcher.get_error()))


def _plain(text: str) -> str:
    """The first line of a message, which may go on for pages."""
    return (text.strip().splitlines() or ["no reason given"])[0][:300].rstrip(".;")
