"""Logprobs on the wire, in the two shapes that OpenAI's endpoints have for them."""

from __future__ import annotations

from typing import Any

import msgspec

from millrace.protocol import TokenLogprob
from millrace.text.vocabulary import Vocabulary


class TokenEntry(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


def token_entry(vocabulary: Vocabulary, token: int, logprob: float) -> TokenEntry:
    raw = vocabulary.bytes_of(token)
    return TokenEntry(raw.decode("utf-8", "replace"), logprob, list(raw))


def chat_logprobs(vocabulary: Vocabulary, items: list[TokenLogprob]) -> dict[str, Any]:
    """`choices[].logprobs` as chat has it."""
    content = []
    for item in items:
        entry = msgspec.structs.asdict(token_entry(vocabulary, item.token, item.logprob))
        entry["top_logprobs"] = [token_entry(vocabulary, t, v) for t, v in item.top]
        content.append(entry)
    return {"content": content, "refusal": None}


def token_name(vocabulary: Vocabulary, token: int) -> str:
    """A token as completions name it; one that is no text by itself is told apart by its bytes."""
    raw = vocabulary.bytes_of(token)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{b:02x}" for b in raw)


class CompletionLogprobs:
    """`choices[].logprobs` as completions have it; offsets run on over the pieces of a stream."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._offset = 0

    def first(self, token: int) -> dict[str, Any]:
        """The prompt's first token, which nothing comes before."""
        name = token_name(self._vocabulary, token)
        value = {
            "tokens": [name],
            "token_logprobs": [None],
            "top_logprobs": [None],
            "text_offset": [self._offset],
        }
        self._offset += len(name)
        return value

    def add(self, items: list[TokenLogprob]) -> dict[str, Any]:
        names = [token_name(self._vocabulary, i.token) for i in items]
        offsets = []
        for name in names:
            offsets.append(self._offset)
            self._offset += len(name)
        return {
            "tokens": names,
            "token_logprobs": [i.logprob for i in items],
            "top_logprobs": [
                {token_name(self._vocabulary, t): v for t, v in i.top} if i.top else None
                for i in items
            ],
            "text_offset": offsets,
        }


def joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Several stretches of completion logprobs as one."""
    keys = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return {k: [v for part in parts for v in part[k]] for k in keys}
