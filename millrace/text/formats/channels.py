"""Answers made of messages, each with a header that says whom it is for (gpt-oss's Harmony).

Owns headers and routing: a channel or recipient makes a body reasoning, content or a call.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from millrace.text.formats.decoding import Decoding
from millrace.text.formats.reader import Malformed, Steps, Write, discard
from millrace.text.formats.syntax import Messages
from millrace.text.stops import Patterns

_RECIPIENT = re.compile(r"(?:^|\s)to=(\S+)")

Body = Callable[[Patterns], Steps[str | None]]


class Router:
    """Reads header, body, header, body; a body without any header is content."""

    def __init__(
        self,
        syntax: Messages,
        state: Decoding,
        in_header: bool,
        body: Body,
        at_start: Callable[[], Steps[None]],
    ) -> None:
        self._syntax = syntax
        self._state = state
        self._in_header = in_header
        self._inline = body
        self._at_start = at_start
        self._markers = Patterns([*syntax.header, syntax.message, syntax.start, *syntax.ends])

    def run(self, thinking: Callable[[bool], None]) -> Steps[None]:
        reader = self._state.reader
        if not self._in_header:
            marker = yield from self._text(self._state.sink.content)
        else:
            marker = yield from reader.until(self._markers, discard)
        while marker is not None:
            if marker == self._syntax.message:
                marker = yield from self._dispatch("", "", thinking)
            elif marker in self._syntax.ends:
                marker = yield from reader.until(self._markers, discard)
            else:
                header, channel, marker = yield from self._header(marker)
                if marker == self._syntax.message:
                    marker = yield from self._dispatch(header, channel, thinking)
            thinking(False)

    def _header(self, marker: str) -> Steps[tuple[str, str, str | None]]:
        """The whole header, the channel's name, and the marker after them."""
        whole: list[str] = []
        channel = ""
        found: str | None = marker
        while found is not None and found not in (self._syntax.message, *self._syntax.ends):
            if found == self._syntax.start:
                whole, channel = [], ""
            text, following = yield from self._state.reader.collect(self._markers)
            whole.append(text)
            words = text.split()
            if found in self._syntax.header[:1] and words:
                channel = words[0]
            found = following
        return " ".join(whole), channel, found

    def _dispatch(
        self, header: str, channel: str, thinking: Callable[[bool], None]
    ) -> Steps[str | None]:
        syntax, sink = self._syntax, self._state.sink
        match = _RECIPIENT.search(header)
        recipient = match.group(1) if match else None
        sink.marker()
        if recipient == syntax.self_recipient is not None or (
            channel in syntax.reasoning and recipient is None
        ):
            thinking(True)
            return (yield from self._text(sink.reasoning))
        if syntax.inline_bodies:
            return (yield from self._inline(self._markers))
        if recipient is not None and recipient != "all":
            return (yield from self._call(recipient, channel))
        yield from self._at_start()
        return (yield from self._text(sink.content))

    def _text(self, write: Write) -> Steps[str | None]:
        marker = yield from self._state.reader.until(self._markers, write)
        # One that a stop or a limit cut off ends with what it said last, blanks too.
        if marker is not None:
            self._state.sink.marker()
        return marker

    def _call(self, recipient: str, channel: str) -> Steps[str | None]:
        """A body addressed to a tool; one nobody offered is text of its channel."""
        state, reader = self._state, self._state.reader
        name = recipient.removeprefix(self._syntax.recipient_prefix)
        here = reader.hold()
        state.committed, state.soft = False, True
        written: Write = discard
        try:
            yield from state.blanks()
            empty = yield from reader.sees_any(self._markers)
            if not empty:
                yield from state.check_arguments()
            state.begin(name)
            if empty:
                state.write("{}")
            else:
                yield from state.arguments(name)
            state.end()
        except Malformed:
            if state.committed:
                state.cut()
                yield from state.recover()
            elif reader.truncated and name in state.sink.tools:
                reader.drop_rest()
            else:
                reader.back(here)
                hidden = channel in self._syntax.reasoning
                written = state.sink.reasoning if hidden else state.sink.content
        reader.release(here)
        marker = yield from reader.until(self._markers, written)
        state.sink.marker()
        return marker
