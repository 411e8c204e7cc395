"""The wire types of what the Responses endpoints answer, for those who read the description."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from millrace.text.loops import AnswerLoop

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class ResponseObject(msgspec.Struct):
    """A response. `output` holds messages, reasoning and calls; the request's fields come back."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Status
    model: str
    output: list[dict[str, Any]]
    error: dict[str, Any] | None
    incomplete_details: dict[str, Any] | None
    usage: dict[str, Any] | None
    finish_details: AnswerLoop | msgspec.UnsetType = msgspec.UNSET


class ResponseEvent(msgspec.Struct):
    """A piece of a streamed response; the last is its end, and no `[DONE]` follows."""

    type: str
    sequence_number: int


class Compaction(msgspec.Struct):
    """The user's messages, and one item of type `compaction` that stands for all else."""

    id: str
    object: Literal["response.compaction"]
    created_at: int
    output: list[dict[str, Any]]
    usage: dict[str, Any]


class InputTokens(msgspec.Struct):
    object: Literal["response.input_tokens"]
    input_tokens: int


class Deleted(msgspec.Struct):
    id: str
    object: str
    deleted: Literal[True]


class ConversationObject(msgspec.Struct):
    id: str
    object: Literal["conversation"]
    created_at: int
    metadata: dict[str, Any]


class ItemList(msgspec.Struct):
    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class Paging(msgspec.Struct):
    """Which part of a list is wanted."""

    after: str | None = None
    """The item after which, in the order of the list, the page begins."""
    before: str | None = None
    """The item before which it ends."""
    limit: int = 20
    order: Literal["asc", "desc"] = "desc"


class Following(msgspec.Struct):
    """Whether a response that is made in the background is followed, and from which event on."""

    stream: bool = False
    starting_after: int | None = None
