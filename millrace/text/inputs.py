"""Texts for an encoder as tokens: prompts before them, pairs, what is too long cut or refused.

One way from texts to what the engine takes, for every protocol, as a task that a thread of the front
or a worker process runs (millrace.text.tasks).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from millrace.errors import BadRequest, InputTooLong

if TYPE_CHECKING:
    from millrace.text.tasks import TextSide
    from millrace.text.tokenizer import Tokenizer

Cut = Literal["none", "right", "left"]
"""What becomes of a text that is too long: refused, or without its end, or without its start."""
DEFAULT_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_JUDGE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n",
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
)
"""How Qwen3-Reranker was taught to be asked: its answer follows an empty thought."""


class Inputs(msgspec.Struct, kw_only=True):
    """Texts as the engine takes them (millrace.protocol.Encode)."""

    tokens: list[bytes]
    segments: list[int] = []
    skips: list[int] = []

    @property
    def count(self) -> int:
        """All their tokens."""
        return sum(map(len, self.tokens)) // 4

    @property
    def longest(self) -> int:
        """Tokens of the longest."""
        return max(map(len, self.tokens), default=0) // 4


def packed(tokens: Sequence[int]) -> bytes:
    return array("i", tokens).tobytes()


class TextsTask(msgspec.Struct, tag="texts", kw_only=True):
    """Texts, each of which is encoded by itself."""

    texts: list[str]
    limit: int
    """Tokens of each, special ones included."""
    cut: Cut = "none"
    prompt: str = ""
    special: bool = True
    lowercase: bool = False
    skip_prompt: bool = False
    """Whether the prompt's own tokens are left out of the pooling."""
    own_limit: int | None = None
    """Tokens of a text without all that is put around it; what is beyond is left out."""
    param: str = "input"

    def run(self, side: TextSide) -> Inputs:
        tokenizer = side.tokenizer
        texts = [
            (self.prompt + text).strip()
            for text in _all_shortened(tokenizer, self.texts, self.own_limit)
        ]
        if self.lowercase:
            texts = [text.lower() for text in texts]
        if self.cut == "none":
            found = tokenizer.encodings(texts, special=self.special)
        else:
            found = _cut(tokenizer, texts, self.limit, self)
        tokens = [list(e.ids) for e in found]
        _check(tokens, self.limit, self.param, several=len(self.texts) > 1)
        skips: list[int] = []
        if self.skip_prompt and self.prompt:
            skips = _skips(tokenizer, self.prompt, tokens)
        return Inputs(tokens=[packed(t) for t in tokens], skips=skips)

    def size(self) -> int:
        return _size(self.texts)


def _cut(tokenizer: Tokenizer, texts: list[str], limit: int, task: TextsTask) -> list[Any]:
    least = tokenizer.special_count() + 1 if task.special else 1
    if limit < least:
        raise BadRequest(f"An input cannot be cut to {limit} tokens: {least} are the fewest.")
    return tokenizer.cut(texts, limit, special=task.special, left=task.cut == "left")


def _check(tokens: list[list[int]], limit: int, param: str, *, several: bool) -> None:
    for number, ids in enumerate(tokens):
        name = f"{param}[{number}]" if several else param
        if not ids:
            raise BadRequest(f"{name} is empty: this model has nothing to encode.", param=param)
        if len(ids) > limit:
            raise InputTooLong(name, len(ids), limit)


def _skips(tokenizer: Tokenizer, prompt: str, tokens: list[list[int]]) -> list[int]:
    ids = tokenizer.encode(prompt.strip(), special=True)
    after = len(ids) - len(tokenizer.encode(prompt.strip()))
    # What ends the prompt as a text of its own ends no prompt that a text follows.
    length = len(ids) - min(1, after)
    return [min(length, len(t) - 1) for t in tokens]


class PairsTask(msgspec.Struct, tag="pairs", kw_only=True):
    """Queries and documents that are looked at together."""

    queries: list[str]
    documents: list[str]
    limit: int
    cut: Cut = "right"
    document_limit: int | None = None
    """Tokens of a document; what is beyond is left out."""
    judge: bool = False
    instruction: str = DEFAULT_INSTRUCTION
    param: str = "documents"

    def run(self, side: TextSide) -> Inputs:
        tokenizer = side.tokenizer
        documents = _all_shortened(tokenizer, self.documents, self.document_limit)
        pairs = list(zip(self.queries, documents, strict=True))
        return self._judged(tokenizer, pairs) if self.judge else self._paired(tokenizer, pairs)

    def _paired(self, tokenizer: Tokenizer, pairs: list[tuple[str, str]]) -> Inputs:
        if self.cut != "none":
            least = tokenizer.special_count(pair=True) + 2
            if self.limit < least:
                text = f"Pairs cannot be cut to {self.limit} tokens: {least} are the fewest."
                raise BadRequest(text)
            found = tokenizer.cut(pairs, self.limit, special=True, left=self.cut == "left")
        else:
            found = tokenizer.encodings(pairs, special=True)
        tokens = [list(e.ids) for e in found]
        _check(tokens, self.limit, self.param, several=True)
        segments = [_second(e.type_ids) for e in found]
        return Inputs(tokens=[packed(t) for t in tokens], segments=segments)

    def _judged(self, tokenizer: Tokenizer, pairs: list[tuple[str, str]]) -> Inputs:
        before, after = (tokenizer.encode(part) for part in _JUDGE)
        room = self.limit - len(before) - len(after)
        texts = [
            f"<Instruct>: {self.instruction}\n<Query>: {query}\n<Document>: {document}"
            for query, document in pairs
        ]
        if self.cut != "none" and room > 0:
            found = tokenizer.cut(texts, room, special=False, left=self.cut == "left")
        else:
            found = tokenizer.encodings(texts, special=False)
        tokens = [[*before, *e.ids, *after] for e in found]
        _check(tokens, self.limit, self.param, several=True)
        return Inputs(tokens=[packed(t) for t in tokens])

    def size(self) -> int:
        return _size(self.documents) + _size(self.queries)


def _second(types: list[int]) -> int:
    """Where the second of two texts begins, for models that are told."""
    return types.index(1) if 1 in types else 0


def _all_shortened(tokenizer: Tokenizer, texts: list[str], limit: int | None) -> list[str]:
    return texts if limit is None else [_shortened(tokenizer, text, limit) for text in texts]


def _shortened(tokenizer: Tokenizer, text: str, limit: int) -> str:
    tokens, ends = tokenizer.encode_placed(text)
    return text if len(tokens) <= limit else text[: ends[limit - 1]]


def _size(texts: list[str]) -> int:
    # The queries of a rerank are one text many times over: what they cost to tokenise counts.
    return sum(map(len, texts)) + 16 * len(texts)
