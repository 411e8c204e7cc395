"""From one request's events to an engine's messages: chunks as tokens come, a last word per choice.

What ended an answer by a token of its own is counted and not sent: the gateway would take it for text,
and not tell its client what matched. It is sent where the request wants stops left in. The gateway does not
pass that wish on for /generate, but reads the whole answer's last token by it when special tokens are to be
shown: then the token is sent, too. A stop string is sent with the tokens that hold it, since the
gateway cuts the text itself, within a token too.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from types import ModuleType
from typing import Any

from millrace.errors import Cancelled
from millrace.protocol import TokenLogprob
from millrace.serving.request import Request
from millrace.serving.running import Running
from millrace.text.deltas import Delta, PromptScores, TextFinish
from millrace.text.tokenizer import Tokenizer

_CHANNEL_ENDS = ("<|return|>", "<|call|>")
"""What ends a Harmony answer is also what says how to read it."""


class Endings:
    """What a model's answers end with, as far as the gateway must not see it, or must."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.eos = tokenizer.eos_ids
        special = tokenizer.vocabulary.added
        texts = {text: id for id, text in special.items() if text in _CHANNEL_ENDS}
        self.shown = frozenset(texts.values()) if len(texts) == len(_CHANNEL_ENDS) else frozenset()

    def matched(self, finish: TextFinish) -> str | int | None:
        """The request's stop that ended an answer. The model's own end is none, whoever names it."""
        return None if finish.matched in self.eos else finish.matched


class _Choice:
    """One answer so far."""

    def __init__(self) -> None:
        self.count = 0
        """Tokens made, those that are not sent included."""
        self.tokens: list[int] = []
        self.scores: list[TokenLogprob] = []
        self.ended = False


class Answers:
    """The messages of one request, in the classes of `messages`."""

    def __init__(
        self,
        messages: ModuleType,
        request: Request,
        running: Running,
        endings: Endings,
        *,
        streamed: bool,
    ) -> None:
        self._messages: Any = messages
        self._request = request
        self._running = running
        self._endings = endings
        self._streamed = streamed
        self._choices = [_Choice() for _ in range(running.n)]
        self._prompt: Any = None
        """The prompt's scores, for each choice's first message."""

    async def messages(self) -> AsyncIterator[Any]:
        try:
            async for event in self._running.events():
                match event:
                    case Delta():
                        for message in self._told(event):
                            yield message
                    case PromptScores(items=items):
                        self._prompt = self._input_scores(items)
        except Cancelled:
            for index, choice in enumerate(self._choices):
                if not choice.ended:
                    yield self._complete(index, "abort", None)

    def _told(self, delta: Delta) -> Iterable[Any]:
        choice = self._choices[delta.choice]
        tokens, scores = list(delta.tokens), list(delta.logprobs)
        choice.count += len(tokens)
        finish = delta.piece if isinstance(delta.piece, TextFinish) else None
        if finish is not None and finish.token is not None:
            if self._shows(finish.token):
                scores += [finish.score] if finish.score is not None else []
            else:
                tokens.pop()
        if self._streamed and tokens:
            yield self._chunk(delta.choice, tokens, scores)
        elif tokens:
            choice.tokens += tokens
            choice.scores += scores
        if finish is not None:
            yield self._complete(delta.choice, finish.reason, self._endings.matched(finish))

    def _shows(self, ending: int) -> bool:
        """Whether the gateway is sent the token that ended an answer."""
        request = self._request
        read_by_gateway = not (self._streamed or request.skip_special_tokens)
        return ending in self._endings.shown or request.include_stop or read_by_gateway

    def _chunk(self, index: int, tokens: list[int], scores: list[TokenLogprob]) -> Any:
        choice = self._choices[index]
        first, choice.tokens = not choice.tokens, tokens
        said = {"input_logprobs": self._prompt} if first and self._prompt is not None else {}
        chunk = self._messages.GenerateStreamChunk(
            token_ids=tokens,
            prompt_tokens=len(self._request.prompt),
            completion_tokens=choice.count,
            cached_tokens=self._running.usage.cached,
            output_logprobs=self._output_scores(scores),
            index=index,
            **said,
        )
        return self._messages.GenerateResponse(chunk=chunk)

    def _complete(self, index: int, reason: str, matched: str | int | None) -> Any:
        choice = self._choices[index]
        choice.ended = True
        said: dict[str, Any] = {}
        fields = self._messages.GenerateComplete.DESCRIPTOR.fields_by_name
        if isinstance(matched, str):
            said["matched_stop_str"] = matched
        elif matched is not None:
            name = "matched_token_id" if "matched_token_id" in fields else "matched_stop_token_id"
            said[name] = matched
        if self._prompt is not None and not (self._streamed and choice.tokens):
            said["input_logprobs"] = self._prompt
        if not self._streamed:
            said |= {
                "output_ids": choice.tokens,
                "output_logprobs": self._output_scores(choice.scores),
            }
        complete = self._messages.GenerateComplete(
            finish_reason=reason,
            prompt_tokens=len(self._request.prompt),
            completion_tokens=choice.count,
            cached_tokens=self._running.usage.cached,
            index=index,
            **said,
        )
        return self._messages.GenerateResponse(complete=complete)

    def _output_scores(self, scores: list[TokenLogprob]) -> Any:
        if self._request.logprobs is None or not scores:
            return None
        return self._messages.OutputLogProbs(
            token_logprobs=[s.logprob for s in scores],
            token_ids=[s.token for s in scores],
            top_logprobs=map(self._top, scores) if self._request.logprobs else (),
        )

    def _input_scores(self, scores: list[TokenLogprob]) -> Any:
        """Nothing comes before the first token, so that it has no score."""
        value, top = self._messages.InputTokenLogProb, self._messages.TopLogProbs
        return self._messages.InputLogProbs(
            token_logprobs=[value(), *(value(value=s.logprob) for s in scores)],
            token_ids=self._request.prompt,
            top_logprobs=[top(), *map(self._top, scores)] if self._request.prompt_logprobs else (),
        )

    def _top(self, score: TokenLogprob) -> Any:
        return self._messages.TopLogProbs(
            values=[logprob for _, logprob in score.top],
            token_ids=[token for token, _ in score.top],
        )
