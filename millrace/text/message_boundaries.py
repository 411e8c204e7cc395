"""Where messages end in a prompt: the places at which a later prompt may part from it.

Found by rendering, since only the template knows what stands between two messages. Needed for models
whose state cannot be cut anywhere; the positions are advice and never change an answer.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import msgspec

from millrace.errors import BadRequest
from millrace.text.conversation import Conversation, ConversationTurn
from millrace.text.dialect import Dialect

RECENT = 3
"""Messages whose ends are looked for; those of earlier ones were found in earlier turns."""
_MOST_TAIL = 0.5
"""The part of a prompt that its last message may be to stay whole."""
_HEADER = 32
"""Tokens that a message may have before its words."""
_SYSTEM = ("system", "developer")
_WORDS = "\ue002"
"""A private character, which no template and no text has."""


def boundaries(
    dialect: Dialect,
    chat: Conversation,
    text: str,
    ends: Sequence[int],
    place: Callable[[int], int] = int,
) -> list[int]:
    """How many tokens of the prompt come before each boundary.

    `text` is the rendered prompt and `ends` says at which character each of its tokens ends, in what
    became of it, where `place` finds the rendered prompt's characters.
    """
    places = {bisect.bisect_right(ends, place(at)) for at in _places(dialect, chat, text)}
    return sorted(p for p in places if 0 < p < len(ends))


def opening(dialect: Dialect, chat: Conversation) -> str:
    """All that the prompt has before its first user's words: the system message and the tools."""
    first = next((i for i, m in enumerate(chat.messages) if m.role == "user"), None)
    before = chat.messages[:first]
    return _render(dialect, chat, [*before, _said("user")]).partition(_WORDS)[0]


def borders(
    dialect: Dialect,
    chat: Conversation,
    text: str,
    ends: Sequence[int],
    place: Callable[[int], int] = int,
) -> tuple[int, int | None]:
    """How many tokens of the prompt come before the first user's words, and how many before the last
    message, for those who leave out what lies between; None where the last message is too much to stay.

    Results of tools just before the last message are part of it: they have not been answered yet. So is
    what an answer that is to be continued answers. A user's message that is most of the prompt is not
    kept whole, since nothing would be gained then. Where a template writes the system prompt or the tools
    further down than at the beginning, what comes after them stays with them.
    """
    if not chat.messages:
        return 0, None

    def tokens(characters: int) -> int:
        return bisect.bisect_right(ends, place(characters))

    try:
        opened = opening(dialect, chat)
    except BadRequest:
        opened = ""
    head = tokens(_shared(opened, text))
    first = _last(chat.messages)
    tail: int | None = None
    if first:
        tail = _tail(dialect, chat, text, first, tokens)
    if any(m.role == "tool" for m in chat.messages[first:]):
        tail = tail or 0
    elif tail is not None and len(ends) - tail > (len(ends) - head) * _MOST_TAIL:
        tail = None
    if not text.startswith(opened):
        others = [m for m in chat.messages if m.role not in _SYSTEM]
        try:
            moved = tokens(_shared(_render(dialect, replace(chat, tools=[]), others), text))
        except BadRequest:
            moved = 0
        if moved > head:
            tail = moved if tail is None else min(tail, moved)
    return head, tail


def _last(messages: Sequence[ConversationTurn]) -> int:
    """Where the last message begins, with all that has not been answered."""
    first = len(messages) - 1
    if first and messages[first].role == "assistant":
        first -= 1
    while first and messages[first - 1].role == "tool":
        first -= 1
    return first


def _tail(
    dialect: Dialect, chat: Conversation, text: str, first: int, tokens: Callable[[int], int]
) -> int | None:
    """How many tokens come before a message; None where the template does not say."""
    messages, found = chat.messages, None
    try:
        before = _render(dialect, chat, messages[:first])
        found = tokens(_shared(before, text))
        if text.startswith(before):
            return found
    except BadRequest:  # templates refuse conversations that end with this role or that
        pass
    # What came before is written otherwise once this has been said.
    begun = msgspec.structs.replace(messages[first], content=_WORDS)
    try:
        words = tokens(_shared(_render(dialect, chat, [*messages[:first], begun]), text))
    except BadRequest:
        return found
    return max(found or 0, words - _HEADER)


def _places(dialect: Dialect, chat: Conversation, text: str) -> Iterator[int]:
    """The same in characters."""
    messages = chat.messages
    try:
        yield _shared(opening(dialect, chat), text)
    except BadRequest:
        pass
    for count in range(len(messages), max(0, len(messages) - RECENT), -1):
        try:
            begun = _render(dialect, chat, messages[:count])
        except BadRequest:
            continue  # templates refuse conversations that end with this role or that
        if text.startswith(begun):
            yield len(begun)
    # The next turn, once there is an answer: templates drop thoughts then, or move the tools.
    answered = [] if messages[-1].role == "assistant" else [_said("assistant")]
    try:
        yield _shared(_render(dialect, chat, [*messages, *answered, _said("user")]), text)
    except BadRequest:
        pass


def _render(dialect: Dialect, chat: Conversation, messages: Sequence[ConversationTurn]) -> str:
    return dialect.render(
        replace(chat, messages=messages, add_generation_prompt=False, continue_final=False)
    )


def _said(role: str) -> ConversationTurn:
    return ConversationTurn(role, _WORDS)


def _shared(one: str, other: str) -> int:
    """How many characters two texts have in common, counted from their beginnings."""
    return bisect.bisect_left(
        range(1, min(len(one), len(other)) + 1),
        True,
        key=lambda count: one[:count] != other[:count],
    )
