"""The whole answer as a fold over its stream: written once, used by every protocol."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from millrace.protocol import TokenLogprob
from millrace.text.deltas import (
    Content,
    Delta,
    Event,
    Idle,
    PromptScores,
    Reasoning,
    TextFinish,
    ToolCallArguments,
    ToolCallStart,
    Usage,
)


@dataclass
class ToolCall:
    id: str
    name: str
    arguments: str = ""


@dataclass
class FoldedAnswer:
    """One choice, complete."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    finish: TextFinish | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    """All that it made, a stop token that ended it included."""
    prompt: list[TokenLogprob] = field(default_factory=list)
    """Scores of the prompt's tokens, where asked for."""

    def add(self, delta: Delta) -> None:
        self.logprobs += delta.logprobs
        self.tokens += delta.tokens
        match delta.piece:
            case Content(text=text):
                self.content += text
            case Reasoning(text=text):
                self.reasoning += text
            case ToolCallStart(id=id, name=name):
                self.calls.append(ToolCall(id, name))
            case ToolCallArguments(index=index, text=text):
                self.calls[index].arguments += text
            case TextFinish() as finish:
                self.finish = finish


async def fold(events: AsyncIterator[Event], n: int) -> tuple[list[FoldedAnswer], Usage]:
    answers = [FoldedAnswer() for _ in range(n)]
    usage = Usage(0, 0)
    async for event in events:
        match event:
            case Delta(choice=choice):
                answers[choice].add(event)
            case PromptScores(first_choice=first, items=items):
                answers[first].prompt = items
            case Usage():
                usage = event
            case Idle():
                pass
    return answers, usage
