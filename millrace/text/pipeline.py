"""From one choice's tokens to its typed pieces: detokenise, then split into what it means."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from millrace.protocol import RowTokens, TokenLogprob
from millrace.text.deltas import Content, Finish, Piece
from millrace.text.detokenizer import Detokenizer
from millrace.text.vocabulary import Vocabulary


class ChoicePipeline:
    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        stop_token_ids: Sequence[int] = (),
        skip_special: bool = True,
    ) -> None:
        self._detokenizer = Detokenizer(vocabulary, skip_special=skip_special)
        self._wanted_stops = frozenset(stop_token_ids)
        self._logprobs: list[TokenLogprob] = []

    def feed(self, row: RowTokens) -> Iterator[tuple[Piece | Finish, list[TokenLogprob]]]:
        """The pieces that these tokens complete. A token that stops the row is not text."""
        ending = row.tokens[-1] if row.finish == "stop" else None
        count = len(row.tokens) - (ending is not None)
        text = "".join(self._detokenizer.feed(t) for t in row.tokens[:count])
        # Logprobs of tokens that complete no character yet wait for the piece that does.
        self._logprobs += row.logprobs[:count]
        if text:
            yield Content(text), self._take_logprobs()
        if row.finish is not None:
            matched = ending if ending in self._wanted_stops else None
            reason: Literal["length", "stop"] = "length" if row.finish == "length" else "stop"
            yield Finish(reason, matched), self._take_logprobs()

    def _take_logprobs(self) -> list[TokenLogprob]:
        taken, self._logprobs = self._logprobs, []
        return taken
