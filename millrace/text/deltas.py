"""The typed pieces of an answer: what the front's core emits and every protocol translates.

A stream is a run of these per choice, ended by exactly one Finish. The whole answer is a fold over
them, so streamed and whole cannot differ.
"""

from __future__ import annotations

import msgspec


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
