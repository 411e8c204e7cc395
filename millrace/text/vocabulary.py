"""What each token stands for, as bytes: the ground that detokenising and logprobs stand on."""

from __future__ import annotations

import json
import re
from typing import Any

from tokenizers import Tokenizer as _Fast

_BYTE_TOKEN = re.compile(r"^<0x([0-9A-Fa-f]{2})>$")


class Vocabulary:
    """Token id → bytes, worked out on demand."""

    def __init__(self, fast: _Fast) -> None:
        self._fast = fast
        added = fast.get_added_tokens_decoder()
        self._added = {id: token.content for id, token in added.items()}
        self.special = frozenset(id for id, token in added.items() if token.special)
        self._byte_level = _uses_byte_level(fast)
        self._known: dict[int, bytes] = {}

    def __len__(self) -> int:
        return int(self._fast.get_vocab_size(with_added_tokens=True))

    @property
    def added(self) -> dict[int, str]:
        """The tokens outside the plain vocabulary, special or not."""
        return self._added

    def id_of(self, text: str) -> int | None:
        id = self._fast.token_to_id(text)
        return None if id is None else int(id)

    def bytes_of(self, id: int) -> bytes:
        """The bytes a token adds to a text; ids beyond the vocabulary add none."""
        known = self._known.get(id)
        if known is None:
            known = self._known[id] = self._work_out(id)
        return known

    def _work_out(self, id: int) -> bytes:
        if id in self._added:
            return self._added[id].encode()
        token = self._fast.id_to_token(id)
        if token is None:
            return b""
        if self._byte_level:
            return b"".join(BYTE_ALPHABET.get(c) or c.encode() for c in token)
        if match := _BYTE_TOKEN.match(token):
            return bytes([int(match[1], 16)])
        return str(token).replace("▁", " ").encode()


def _uses_byte_level(fast: _Fast) -> bool:
    decoder: dict[str, Any] | None = json.loads(fast.to_str()).get("decoder")
    if decoder is None:
        return False
    parts = decoder.get("decoders") or [decoder]
    return any(p.get("type") == "ByteLevel" for p in parts)


def _byte_alphabet() -> dict[str, bytes]:
    """Byte-level BPE writes bytes as printable characters: itself if printable, else from U+0100."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(b): bytes([b]) for b in plain}
    others = (b for b in range(256) if b not in set(plain))
    return table | {chr(256 + n): bytes([b]) for n, b in enumerate(others)}


BYTE_ALPHABET = _byte_alphabet()
"""The characters of byte-level vocabularies, and the bytes they stand for."""
