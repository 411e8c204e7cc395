"""The typed pieces of an answer: what the front's core emits and every protocol translates.

A stream is a run of these per choice, ended by exactly one Finish. The whole answer is a fold over
them, so streamed and whole cannot differ.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from millrace.protocol import TokenLogprob
from millrace.text.loops import AnswerLoop


class Content(msgspec.Struct, frozen=True, tag="content"):
    text: str


class Reasoning(msgspec.Struct, frozen=True, tag="reasoning"):
    text: str


class ToolCallStart(msgspec.Struct, frozen=True, tag="tool_call_start"):
    """Opens call `index` (0, 1, … within the choice). Its arguments follow in pieces."""

    index: int
    id: str
    name: str


class ToolCallArguments(msgspec.Struct, frozen=True, tag="tool_call_arguments"):
    """A piece of the JSON text of call `index`'s arguments; the pieces concatenate to valid JSON."""

    index: int
    text: str


Piece = Content | Reasoning | ToolCallStart | ToolCallArguments


class TextFinish(msgspec.Struct, frozen=True, tag="finish"):
    """Ends a choice. `matched` is the stop string or stop token id of the request that ended it."""

    reason: Literal["stop", "length", "tool_calls"]
    matched: str | int | None = None
    token: int | None = None
    """The stop token that was made last, if one was: it is no text."""
    score: TokenLogprob | None = None
    """That token's logprob, where the request asked for logprobs."""
    loop: AnswerLoop | None = None
    """The repetition that ended the choice, where the loop guard did."""

    @property
    def details(self) -> dict[str, AnswerLoop]:
        """What protocols add to an ending that their own fields cannot express; empty for most."""
        return {"finish_details": self.loop} if self.loop is not None else {}


class Delta(msgspec.Struct, frozen=True):
    """A piece of one choice's answer."""

    choice: int
    piece: Piece | TextFinish
    logprobs: list[TokenLogprob] = []
    """Of the tokens that this piece completes, where the request asked for them."""
    tokens: list[int] = []
    """Those tokens themselves; over a choice, all that it made, the stop token last."""


class PromptScores(msgspec.Struct, frozen=True, tag="prompt_scores"):
    """The logprobs of the prompt's tokens from the second on; before any delta of its choices."""

    first_choice: int
    items: list[TokenLogprob]


class Usage(msgspec.Struct, frozen=True, tag="usage"):
    """What the request cost, as it was; the last item of every stream."""

    prompt: int
    completion: int
    cached: int = 0
    """Prompt tokens whose state was found and not computed."""
    written: int = 0
    """Prompt tokens whose state was computed and kept for later requests."""
    reasoning: int = 0


class Idle(msgspec.Struct, frozen=True, tag="idle"):
    """Nothing came for a while, and the request is alive: a prompt is being run, or is waiting."""


Event = Delta | PromptScores | Usage | Idle
