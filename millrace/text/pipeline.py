"""From one choice's tokens to its typed pieces: detokenise, tell apart what it means, cut at stops."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from millrace.protocol import RowTokens, TokenLogprob
from millrace.text.deltas import Content, Piece, Reasoning, TextFinish, ToolCallStart
from millrace.text.detokenizer import Detokenizer
from millrace.text.formats import OutputParser
from millrace.text.loops import AnswerLoop, LoopDetector
from millrace.text.stops import StopMatcher
from millrace.text.vocabulary import Vocabulary


class ScoredPiece(NamedTuple):
    """A piece, and the tokens that it completes."""

    piece: Piece | TextFinish
    logprobs: list[TokenLogprob]
    tokens: list[int]


class ChoicePipeline:
    """Reads one choice. Without a parser, all text is content (a raw completion)."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        parser: OutputParser | None = None,
        stops: Sequence[str] = (),
        include_stop: bool = False,
        stop_in_reasoning: bool = False,
        stop_token_ids: Sequence[int] = (),
        watched_ids: Sequence[int] = (),
        min_tokens: int = 0,
        loop_guard: bool = False,
        skip_special: bool = True,
    ) -> None:
        """`watched_ids` are stop tokens that the engine does not know, since they end nothing
        inside a thought. With `loop_guard`, an answer that repeats itself ends (millrace.text.loops).
        """
        self._vocabulary, self._skip_special = vocabulary, skip_special
        self._parser = parser
        self._watched, self._min_tokens = frozenset(watched_ids), min_tokens
        # A parser knows its markers and drops the other special tokens itself.
        self._detokenizer = Detokenizer(vocabulary, skip_special=skip_special and parser is None)
        self._wanted_stops = frozenset(stop_token_ids)
        self._stops, self._include = list(stops), include_stop
        self._content = StopMatcher(self._stops, include_stop)
        self._reasoning = StopMatcher(list(stops) if stop_in_reasoning else [], include_stop)
        self._logprobs: list[TokenLogprob] = []
        self._generated: list[int] = []
        self._ending: tuple[int, TokenLogprob | None] | None = None
        self._called = False
        self._loops = LoopDetector() if loop_guard else None
        self.tokens = 0
        self.reasoning_tokens = 0
        self.done = False
        """A finish has been given; whatever still comes is thrown away."""

    def feed(self, row: RowTokens) -> Iterator[ScoredPiece]:
        """The pieces that these tokens complete. A token that stops the row is not text."""
        ending = row.tokens[-1] if row.finish == "stop" else None
        count = len(row.tokens) - (ending is not None)
        for i, token in enumerate(row.tokens[:count]):
            if token in self._watched and self._stops_here():
                yield from self._stopped(token, row.logprobs[i : i + 1])
                return
            self.tokens += 1
            # Tokens that complete no character yet wait for the piece that does.
            self._generated.append(token)
            self._logprobs += row.logprobs[i : i + 1]
            yield from self._read(self._detokenizer.feed(token))
            if self.done:
                return
            loop = self._loops.accept(token) if self._loops is not None else None
            if loop is not None and self.tokens >= self._min_tokens:
                yield from self._looped(loop)
                return
        if ending is not None:
            yield from self._stopped(ending, row.logprobs[-1:])
        elif row.finish is not None:
            yield from self._end(None, truncated=row.finish == "length")

    def _stops_here(self) -> bool:
        return not self._thinking and self.tokens >= self._min_tokens

    @property
    def _thinking(self) -> bool:
        return self._parser is not None and self._parser.thinking

    def _stopped(self, token: int, score: Sequence[TokenLogprob]) -> Iterator[ScoredPiece]:
        """A token ends the answer; it is not part of it."""
        self.tokens += 1
        self._ending = token, score[0] if score else None
        yield from self._end(token, truncated=False)

    def _looped(self, loop: AnswerLoop) -> Iterator[ScoredPiece]:
        """The answer repeats itself and ends here. It was cut, so that a call may be incomplete."""
        if self._parser is not None:
            yield from self._cut(self._parser.finish(True))
        yield from self._rest()
        if not self.done:
            yield self._finish("stop", None, loop)

    def _read(self, text: str) -> Iterator[ScoredPiece]:
        if self._parser is None:
            yield from self._cut([Content(text)] if text else [])
            return
        pieces = self._parser.feed(text) if text else []
        self.reasoning_tokens += self._parser.thinking
        yield from self._cut(pieces)

    def _end(self, ending: int | None, *, truncated: bool) -> Iterator[ScoredPiece]:
        thinking = self._thinking
        if self._parser is not None:
            pieces: list[Piece] = []
            if ending is not None and ending not in self._wanted_stops:
                # In some families what ends the answer is also what ends a call.
                pieces = self._parser.feed(self._detokenizer.feed(ending))
            yield from self._cut(pieces + self._parser.finish(truncated))
        yield from self._rest()
        if self.done:
            return
        if truncated:
            yield self._finish("length", None)
            return
        if ending is not None and (text := self._shown(ending)):
            yield self._scored(Reasoning(text) if thinking else Content(text))
        yield self._finish("stop", ending if ending in self._wanted_stops else None)

    def _rest(self) -> Iterator[ScoredPiece]:
        """What was held back for a stop string, now that no more text comes."""
        for matcher, kind in ((self._reasoning, Reasoning), (self._content, Content)):
            if self.done:
                return
            rest = matcher.finish()
            if rest.text:
                yield self._scored(kind(rest.text))
            if rest.matched is not None:
                yield self._finish("stop", rest.matched)

    def _shown(self, ending: int) -> str:
        """The text of a token that ended the answer, where the request wants its stops left in."""
        if not self._include or (self._skip_special and ending in self._vocabulary.special):
            return ""
        if self._parser is not None and ending not in self._wanted_stops:
            return ""  # the family's own end of an answer, or of a call
        return self._vocabulary.bytes_of(ending).decode("utf-8", "replace")

    def _cut(self, pieces: Sequence[Piece]) -> Iterator[ScoredPiece]:
        """Pass pieces on, up to a stop string."""
        for piece in pieces:
            if isinstance(piece, Content | Reasoning):
                matcher = self._content if isinstance(piece, Content) else self._reasoning
                result = matcher.feed(piece.text)
                if result.text:
                    yield self._scored(type(piece)(result.text))
                if result.matched is not None:
                    yield self._finish("stop", result.matched)
                    return
                continue
            if isinstance(piece, ToolCallStart):
                self._called = True
                # What was held back for a stop string comes before the call.
                held = self._content.finish()
                self._content = StopMatcher(self._stops, self._include)
                if held.text:
                    yield self._scored(Content(held.text))
                if held.matched is not None:
                    yield self._finish("stop", held.matched)
                    return
            yield self._scored(piece)

    def _finish(
        self,
        reason: Literal["stop", "length"],
        matched: str | int | None,
        loop: AnswerLoop | None = None,
    ) -> ScoredPiece:
        self.done = True
        token, score = self._ending or (None, None)
        if token is not None:
            self._generated.append(token)
        called = reason == "stop" and matched is None and loop is None and self._called
        finish = TextFinish("tool_calls" if called else reason, matched, token, score, loop)
        return self._scored(finish)

    def _scored(self, piece: Piece | TextFinish) -> ScoredPiece:
        logprobs, self._logprobs = self._logprobs, []
        generated, self._generated = self._generated, []
        return ScoredPiece(piece, logprobs, generated)
