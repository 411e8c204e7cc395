"""Where decoders put what they find: text flows, reasoning and calls, turned into ordered pieces.

Owns the rules that hold for every family: blanks around markers, call indexes and ids, and that a
call of a tool nobody offered becomes content.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterable

from millrace.text.deltas import Content, Piece, Reasoning, ToolCallArguments, ToolCallStart
from millrace.text.formats.reader import Write, discard
from millrace.text.formats.tools import ToolSpec

_ID = re.compile(r"[A-Za-z0-9_.:\-]{1,64}\Z")


def random_id() -> str:
    return "call_" + secrets.token_hex(12)


class Flow:
    """A run of text in which blanks next to a marker are dropped and inner ones kept."""

    def __init__(self, write: Write) -> None:
        self._write = write
        self._blank = ""
        self._begun = False
        self._after_marker = False

    def __call__(self, text: str) -> None:
        body = text.rstrip()
        if not body:
            self._blank += text
            return
        if self._after_marker and not self._begun:
            self._blank = ""
            body = body.lstrip()
            text = text.lstrip()
        self._write(self._blank + body)
        self._blank = text[len(body) :]
        self._begun = True
        self._after_marker = False

    def marker(self) -> None:
        """A marker stood here: blanks on both its sides are text only if text follows."""
        self._after_marker = True

    def settle(self) -> None:
        """What came so far was already said elsewhere, and the text goes on from there."""
        self._blank = ""

    def finish(self) -> None:
        if not self._after_marker and self._blank:
            self._write(self._blank)
        self._blank = ""


class Sink:
    """Collects the pieces of one answer."""

    def __init__(
        self,
        tools: Iterable[ToolSpec] | None,
        *,
        parallel: bool = True,
        new_id: Callable[[], str] = random_id,
    ) -> None:
        self.tools = {tool.name: tool for tool in tools or ()}
        self.content = Flow(lambda text: self._add(Content(text)))
        self.reasoning = Flow(lambda text: self._add(Reasoning(text)))
        self.calls = 0
        self._parallel = parallel
        self._new_id = new_id
        self._ids: set[str] = set()
        self._pieces: list[Piece] = []
        self._write: Write = discard
        self._after = ""

    def marker(self) -> None:
        self.content.marker()
        self.reasoning.marker()

    def begin(self, name: str, given_id: str | None = None) -> None:
        """Opens a call; a tool that was not offered is written out as content instead."""
        self.marker()
        if name not in self.tools:
            self.content(json.dumps({"name": name}, ensure_ascii=False)[:-1] + ', "arguments": ')
            self._write, self._after = self.content, "}"
        elif self.calls and not self._parallel:
            self._write, self._after = discard, ""
        else:
            index, self.calls = self.calls, self.calls + 1
            self._add(ToolCallStart(index, self._fresh_id(given_id), name))
            self._write = lambda text: self._add(ToolCallArguments(index, text))
            self._after = ""

    def swallow(self) -> None:
        """Opens a call that means nothing to a client."""
        self.marker()
        self._write, self._after = discard, ""

    def arguments(self, text: str) -> None:
        self._write(text)

    def end(self) -> None:
        """Closes the call that `begin` opened."""
        if self._after:
            self._write(self._after)
        self._write, self._after = discard, ""
        self.marker()

    def drain(self) -> list[Piece]:
        """The pieces since the last call, neighbours of one kind joined."""
        joined: list[Piece] = []
        for piece in self._pieces:
            last = joined[-1] if joined else None
            if isinstance(piece, Content) and isinstance(last, Content):
                joined[-1] = Content(last.text + piece.text)
            elif isinstance(piece, Reasoning) and isinstance(last, Reasoning):
                joined[-1] = Reasoning(last.text + piece.text)
            elif (
                isinstance(piece, ToolCallArguments)
                and isinstance(last, ToolCallArguments)
                and piece.index == last.index
            ):
                joined[-1] = ToolCallArguments(last.index, last.text + piece.text)
            else:
                joined.append(piece)
        self._pieces = []
        return joined

    def finish(self) -> None:
        self.reasoning.finish()
        self.content.finish()

    def _add(self, piece: Piece) -> None:
        self._pieces.append(piece)

    def _fresh_id(self, given: str | None) -> str:
        if given is None or not _ID.match(given) or given in self._ids:
            given = self._new_id()
        self._ids.add(given)
        return given
