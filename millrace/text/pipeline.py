"""From one choice's tokens to its typed pieces: detokenise, then split into what it means."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from millrace.protocol import FinishReason
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

    def feed(self, tokens: Sequence[int], finish: FinishReason | None) -> Iterator[Piece | Finish]:
        """The pieces that these tokens complete. A token that stops the row is not text."""
        ending = tokens[-1] if finish == "stop" else None
        text = "".join(
            self._detokenizer.feed(t) for t in (tokens if ending is None else tokens[:-1])
        )
        if text:
            yield Content(text)
        if finish is not None:
            matched = ending if ending in self._wanted_stops else None
            yield Finish("length" if finish == "length" else "stop", matched)
