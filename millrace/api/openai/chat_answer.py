"""A chat answer on the wire: the chunks of its stream, and their fold, which is the whole answer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from millrace.api.logprobs import chat_logprobs
from millrace.api.openai.envelope import ChunkFolding, ending_in, head_of, usage_of
from millrace.api.openai.tools import Calls, Offer
from millrace.protocol import TokenLogprob
from millrace.serving.model import ServedModel
from millrace.text.deltas import (
    Content,
    Delta,
    Event,
    Reasoning,
    TextFinish,
    ToolCallArguments,
    ToolCallStart,
    Usage,
)

Chunk = dict[str, Any]


class ChatChunks:
    """Events in, chunks out."""

    def __init__(self, id: str, model: ServedModel, logprobs: bool, offer: Offer) -> None:
        self._head = head_of(id, "chat.completion.chunk", model)
        self._vocabulary = model.tokenizer.vocabulary
        self._wants_logprobs = logprobs
        self._offer = offer
        self._calls: dict[int, Calls] = {}

    def begin(self, n: int) -> Iterator[Chunk]:
        for choice in range(n):
            yield self._chunk(choice, {"role": "assistant", "content": ""})

    def feed(self, event: Event) -> Iterator[Chunk]:
        match event:
            case Delta(choice=choice, piece=TextFinish() as finish, logprobs=scores):
                for rest in self._of(choice).rest():
                    yield self._chunk(choice, rest)
                yield self._chunk(choice, {}, scores, finish)
            case Delta(choice=choice, logprobs=scores):
                yield self._chunk(choice, self._delta(event), scores)
            case Usage():
                yield self._head | {"choices": [], "usage": usage_of(event)}

    def _delta(self, event: Delta) -> dict[str, Any]:
        match event.piece:
            case Content(text=text):
                return {"content": text}
            case Reasoning(text=text):
                return {"reasoning_content": text}
            case ToolCallStart(index=index, id=id, name=name):
                return self._of(event.choice).start(index, id, name)
            case ToolCallArguments(index=index, text=text):
                return self._of(event.choice).piece(index, text)
            case TextFinish():
                return {}

    def _of(self, choice: int) -> Calls:
        return self._calls.setdefault(choice, Calls(self._offer))

    def _chunk(
        self,
        choice: int,
        delta: dict[str, Any],
        scores: list[TokenLogprob] | None = None,
        finish: TextFinish | None = None,
    ) -> Chunk:
        told = scores and self._wants_logprobs
        body: dict[str, Any] = {
            "index": choice,
            "delta": delta,
            "logprobs": chat_logprobs(self._vocabulary, scores or []) if told else None,
            "finish_reason": self._reason(finish) if finish else None,
        }
        if finish is not None:
            body |= {"matched_stop": finish.matched} | finish.details
        return self._head | {"choices": [body]}

    def _reason(self, finish: TextFinish) -> str:
        if finish.reason == "tool_calls" and self._offer.legacy:
            return "function_call"
        return finish.reason


class ChatFolding(ChunkFolding):
    """The whole answer, put together from its chunks as a client would."""

    def __init__(self, logprobs: bool) -> None:
        super().__init__()
        self._wants_logprobs = logprobs
        self._known: dict[int, Chunk] = {}

    def _add(self, told: Chunk) -> None:
        choice = self._known.get(told["index"]) or self._opened(told["index"])
        _add_delta(choice["message"], told["delta"])
        if told["logprobs"] is not None:
            choice["logprobs"]["content"] += told["logprobs"]["content"]
        if told["finish_reason"] is not None:
            choice |= ending_in(told)

    def _opened(self, index: int) -> Chunk:
        choice = self._known[index] = {
            "index": index,
            "message": {"role": "assistant", "content": "", "refusal": None},
            "logprobs": {"content": [], "refusal": None} if self._wants_logprobs else None,
            "finish_reason": None,
            "matched_stop": None,
        }
        return choice

    def whole(self) -> Chunk:
        return super().whole() | {"object": "chat.completion"}

    def _choices(self) -> list[Chunk]:
        choices = [self._known[index] for index in sorted(self._known)]
        for choice in choices:
            message = choice["message"]
            if ("tool_calls" in message or "function_call" in message) and not message["content"]:
                message["content"] = None
        return choices


def _add_delta(message: Chunk, delta: Chunk) -> None:
    for name in ("content", "reasoning_content"):
        if name in delta:
            message[name] = message.get(name, "") + delta[name]
    if call := delta.get("function_call"):
        told = message.setdefault("function_call", {"name": "", "arguments": ""})
        _add_texts(told, call)
    for call in delta.get("tool_calls", ()):
        calls = message.setdefault("tool_calls", [])
        if call["index"] == len(calls):
            calls.append({k: _copied(v) for k, v in call.items() if k != "index"})
        else:
            told = calls[call["index"]]
            _add_texts(told[told["type"]], call[told["type"]])


def _add_texts(told: Chunk, more: Chunk) -> None:
    for name, text in more.items():
        told[name] = told.get(name, "") + text


def _copied(value: Any) -> Any:
    return dict(value) if isinstance(value, dict) else value
