"""A completion on the wire: the chunks of its stream, and their fold, which is the whole answer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from millrace.api.logprobs import CompletionLogprobs, joined, token_name
from millrace.api.openai.envelope import ChunkFolding, ending_in, head_of, usage_of
from millrace.api.openai.schema import CompletionRequest
from millrace.protocol import TokenLogprob
from millrace.serving.model import ServedModel
from millrace.text.deltas import Content, Delta, Event, PromptScores, TextFinish, Usage

Chunk = dict[str, Any]


class CompletionChunks:
    """Events in, chunks out; choices are numbered through over all prompts."""

    def __init__(
        self, id: str, model: ServedModel, wire: CompletionRequest, prompts: list[list[int]]
    ) -> None:
        self._head = head_of(id, "text_completion", model)
        self._vocabulary = model.tokenizer.vocabulary
        self._prompts = prompts
        self._texts = [model.tokenizer.decode(p) for p in prompts] if wire.echo else []
        self._made = max(wire.n or 1, wire.best_of or 1)
        """Choices that are made per prompt."""
        self._wants_logprobs = wire.logprobs is not None
        self._wants_prompt = wire.prompt_logprobs is not None
        self._scorers: dict[int, CompletionLogprobs] = {}
        self._scores: dict[int, list[TokenLogprob]] = {}
        """Scores of each prompt."""
        self._begun: set[int] = set()
        self._sums: dict[int, tuple[float, int]] = {}

    def begin(self, n: int) -> Iterator[Chunk]:
        yield from ()

    def feed(self, event: Event) -> Iterator[Chunk]:
        match event:
            case Delta(choice=choice, piece=piece, logprobs=items):
                if choice not in self._begun:
                    self._begun.add(choice)
                    yield from self._opening(choice)
                self._count(choice, items)
                if isinstance(piece, Content | TextFinish):
                    yield self._piece(choice, piece, items)
            case PromptScores(first_choice=first, items=items):
                self._scores[first // self._made] = items
            case Usage():
                yield self._head | {"choices": [], "usage": usage_of(event)}

    def mean_logprob(self, choice: int) -> float:
        total, count = self._sums.get(choice, (0.0, 0))
        return total / count if count else float("-inf")

    def _count(self, choice: int, items: list[TokenLogprob]) -> None:
        total, count = self._sums.get(choice, (0.0, 0))
        self._sums[choice] = total + sum(i.logprob for i in items), count + len(items)

    def _opening(self, choice: int) -> Iterator[Chunk]:
        """What an echo puts before the first piece."""
        number = choice // self._made
        if self._texts or self._wants_prompt:
            text = self._texts[number] if self._texts else ""
            body = _choice(choice, text, self._prompt_part(choice, number))
            yield self._head | {"choices": [body | self._prompt_scores(number)]}

    def _piece(self, choice: int, piece: Content | TextFinish, items: list[TokenLogprob]) -> Chunk:
        scores = self._scorer(choice).add(items) if self._wants_logprobs and items else None
        text, finish = (piece.text, None) if isinstance(piece, Content) else ("", piece)
        return self._head | {"choices": [_choice(choice, text, scores, finish)]}

    def _scorer(self, choice: int) -> CompletionLogprobs:
        if choice not in self._scorers:
            self._scorers[choice] = CompletionLogprobs(self._vocabulary)
        return self._scorers[choice]

    def _prompt_part(self, choice: int, number: int) -> Chunk | None:
        """The logprobs of an echoed prompt."""
        if not (self._texts and self._wants_logprobs):
            return None
        scorer = self._scorer(choice)
        first = scorer.first(self._prompts[number][0])
        return joined([first, scorer.add(self._scores.get(number, []))])

    def _prompt_scores(self, number: int) -> Chunk:
        if not self._wants_prompt:
            return {}
        listed: list[Any] = [None]
        for item in self._scores.get(number, []):
            ranked = [(item.token, item.logprob), *(p for p in item.top if p[0] != item.token)]
            listed.append(
                {
                    str(t): {"logprob": v, "decoded_token": token_name(self._vocabulary, t)}
                    for t, v in ranked
                }
            )
        return {"prompt_logprobs": listed}


class CompletionFolding(ChunkFolding):
    """The whole answer, put together from its chunks; of more than are wanted, the likeliest."""

    def __init__(self, chunks: CompletionChunks, wire: CompletionRequest) -> None:
        super().__init__()
        self._chunks = chunks
        self._n = wire.n or 1
        self._made = max(self._n, wire.best_of or 1)
        self._wants_logprobs = wire.logprobs is not None
        self._known: dict[int, Chunk] = {}

    def _add(self, told: Chunk) -> None:
        known = self._known.get(told["index"])
        if known is None:
            nothing = joined([]) if self._wants_logprobs else None
            self._known[told["index"]] = {**told, "logprobs": told["logprobs"] or nothing}
            return
        known["text"] += told["text"]
        for name, values in (told["logprobs"] or {}).items():
            known["logprobs"][name] += values
        if told["finish_reason"] is not None:
            known |= ending_in(told)

    def _choices(self) -> list[Chunk]:
        chosen = []
        for first in range(0, len(self._known), self._made):
            indexes = list(range(first, first + self._made))
            if self._made > self._n:
                indexes.sort(key=self._chunks.mean_logprob, reverse=True)
            chosen += [self._known[i] for i in indexes[: self._n]]
        return [choice | {"index": i} for i, choice in enumerate(chosen)]


def _choice(
    index: int, text: str, logprobs: Chunk | None = None, finish: TextFinish | None = None
) -> Chunk:
    value: Chunk = {
        "index": index,
        "text": text,
        "logprobs": logprobs,
        "finish_reason": finish.reason if finish else None,
    }
    return value | ({"matched_stop": finish.matched} | finish.details if finish else {})
