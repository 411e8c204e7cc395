"""Limits of answers in `millrace chat`: a token limit and the loop guard, and how they are reported.

They are on by default, since a person waits for the answer. Both, and the request for the usage in every
chunk, are sent only to servers of this kind: others may refuse fields that they do not have.
"""

from __future__ import annotations

from typing import Any

import msgspec

from millrace.cli.conversation import FinishDetails, ReplyUsage, SavedConversation
from millrace.cli.remote import RemoteModel

DEFAULT_MAX_TOKENS = 4096
"""The limit of an answer where neither the person nor the server's configuration sets one."""


class ChatLimits(msgspec.Struct, frozen=True):
    """What applies where the conversation sets nothing; None leaves it to the server."""

    max_tokens: int | None = None
    loop_guard: bool | None = None
    counts_chunks: bool = False
    """Whether the server can report the usage with every chunk: known then of stopped answers, too."""

    def body(self, conversation: SavedConversation) -> dict[str, Any]:
        """The fields of a request."""
        limit = self.limit(conversation)
        body: dict[str, Any] = {"max_tokens": limit, "loop_guard": self.loop_guard}
        if self.counts_chunks:
            body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
        return {name: value for name, value in body.items() if value is not None}

    def limit(self, conversation: SavedConversation) -> int | None:
        own = conversation.max_tokens
        return self.max_tokens if own is None else own or None

    def notice(
        self,
        conversation: SavedConversation,
        finish: str,
        details: FinishDetails | None,
        usage: ReplyUsage,
    ) -> str:
        """Why an answer was cut and how to continue; empty where it was not."""
        if details is not None and details.type == "loop":
            return (
                "The answer repeated itself and was ended by the loop guard. /retry answers again; "
                "--no-loop-guard turns the guard off."
            )
        limit = self.limit(conversation)
        if finish == "length" and limit is not None and usage.completion_tokens >= limit:
            return (
                f"The answer reached the limit of {limit} tokens. Write 'go on' to continue it, or set "
                "another limit with /max N (/max 0 for none)."
            )
        return ""


def limits_for(models: list[RemoteModel], name: str | None, guard: bool | None) -> ChatLimits:
    """The limits for a model of a server; what its configuration sets is left to it."""
    model = next((m for m in models if m.id == name), None)
    if model is None or model.owned_by != "millrace":
        return ChatLimits(None, guard)
    profile = model.profile if isinstance(model.profile, dict) else {}
    if guard is None and "loop_guard" not in profile:
        guard = True
    return ChatLimits(None if "max_tokens" in profile else DEFAULT_MAX_TOKENS, guard, True)
