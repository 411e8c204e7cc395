"""What is told of each answer: text and tokens so far, and SGLang's meta_info beside them."""

from __future__ import annotations

import time
from typing import Any

from millrace.api.generate.request import PromptRequest
from millrace.errors import Cancelled
from millrace.protocol import TokenLogprob
from millrace.serving.fold import FoldedAnswer
from millrace.serving.model import ServedModel
from millrace.serving.running import Running
from millrace.text.deltas import Delta, Event, PromptScores, TextFinish

Scored = list[Any]
"""A token as SGLang tells it: [logprob, id, text or null]."""


class Outputs:
    """The answers to one prompt, as far as they are."""

    def __init__(
        self, prompt_request: PromptRequest, running: Running, model: ServedModel, texts: bool
    ) -> None:
        self._prompt_request = prompt_request
        self._running = running
        self._vocabulary = model.tokenizer.vocabulary
        self._texts = texts
        self._began = time.monotonic()
        self._answers = [FoldedAnswer() for _ in range(running.n)]
        self._scores: list[TokenLogprob] = []
        self._aborted: str | None = None

    @property
    def n(self) -> int:
        return len(self._answers)

    def see(self, event: Event | Cancelled) -> list[int]:
        """Take an event in; returns the answers that it changed."""
        match event:
            case Delta(choice=choice):
                self._answers[choice].add(event)
                return [choice] if event.tokens or isinstance(event.piece, TextFinish) else []
            case PromptScores(items=items):
                self._scores = items
            case Cancelled():
                self._aborted = event.message
                return [i for i, a in enumerate(self._answers) if a.finish is None]
        return []

    def tell(self, choice: int) -> dict[str, Any]:
        answer = self._answers[choice]
        tokens = answer.tokens
        meta: dict[str, Any] = {
            "id": self._prompt_request.request.id,
            "finish_reason": self._finish(answer, len(tokens)),
            "prompt_tokens": len(self._prompt_request.request.prompt),
            "completion_tokens": len(tokens),
            "cached_tokens": self._running.usage.cached,
            "e2e_latency": time.monotonic() - self._began,
            "matched_stop": answer.finish.matched if answer.finish else None,
        }
        if self._prompt_request.scored:
            meta |= self._logprobs(answer)
        return {
            "text": answer.content,
            "output_ids": tokens,
            "meta_info": meta,
        }

    def _finish(self, answer: FoldedAnswer, generated: int) -> dict[str, Any] | None:
        finish = answer.finish
        if finish is None:
            return {"type": "abort", "message": self._aborted} if self._aborted else None
        if finish.reason == "length":
            return {"type": "length", "length": generated}
        return {"type": "stop", "matched": finish.matched} | finish.details

    def _logprobs(self, answer: FoldedAnswer) -> dict[str, Any]:
        generated = list(answer.logprobs)
        if answer.finish is not None and answer.finish.score is not None:
            generated.append(answer.finish.score)
        prompt, start = self._prompt_request.request.prompt, self._prompt_request.start
        # Nothing comes before the first token, so it has no logprob; scores begin with the second.
        first = [self._scored(None, prompt[0])] if start == 0 else []
        reported = self._scores[max(0, start - 1) :] if start < len(prompt) else []
        found: dict[str, Any] = {
            "input_token_logprobs": first + [self._scored(s.logprob, s.token) for s in reported],
            "output_token_logprobs": [self._scored(s.logprob, s.token) for s in generated],
        }
        if self._prompt_request.request.logprobs:
            nothing: list[list[Scored] | None] = [None] if first else []
            found["input_top_logprobs"] = nothing + [self._top(s) for s in reported]
            found["output_top_logprobs"] = [self._top(s) for s in generated]
        return found

    def _top(self, score: TokenLogprob) -> list[Scored]:
        return [self._scored(logprob, token) for token, logprob in score.top]

    def _scored(self, logprob: float | None, token: int) -> Scored:
        return [logprob, token, self._token_text(token) if self._texts else None]

    def _token_text(self, token: int) -> str:
        return self._vocabulary.bytes_of(token).decode("utf-8", "replace")
