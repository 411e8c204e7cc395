"""Tokens to characters as they come: no half characters, no lost leading space, linear time."""

from __future__ import annotations

import codecs

from millrace.text.vocabulary import Vocabulary

_Utf8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """The text of one answer. Bytes of an unfinished character wait for the rest of it."""

    def __init__(self, vocabulary: Vocabulary, *, skip_special: bool = True) -> None:
        self._vocabulary = vocabulary
        self._skip = vocabulary.special if skip_special else frozenset()
        self._decoder = _Utf8(errors="replace")

    def feed(self, token: int) -> str:
        if token in self._skip:
            return ""
        return self._decoder.decode(self._vocabulary.bytes_of(token))
