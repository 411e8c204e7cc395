"""Answers that are nothing but calls as JSON, bare or in fences, whatever the model's family.

Small models often forget their family's markup. Such an answer is known for what it is only at its
end, so it is rehearsed here: its calls are kept, and passed on once nothing else has followed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from millrace.text.formats.decoding import Decoding
from millrace.text.formats.json_calls import decode_json
from millrace.text.formats.reader import Malformed, Reader, Steps, discard
from millrace.text.formats.sink import Sink
from millrace.text.formats.syntax import JsonCalls
from millrace.text.stops import Patterns

OPENINGS = frozenset("{[`")
"""How such an answer may begin."""
_LANGUAGE = re.compile(r"[\w\-]+")
_FENCE = "```"
_SYNTAX = JsonCalls(
    name_keys=("name", "tool_name", "tool", "function_name"),
    args_keys=("arguments", "parameters", "args", "tool_input", "input"),
)


@dataclass
class _KeptCall:
    name: str
    id: str | None
    arguments: list[str] = field(default_factory=list)


class _Rehearsal(Decoding):
    """Keeps calls instead of passing them on."""

    recovers = False

    def __init__(self, reader: Reader, sink: Sink, marks: Patterns) -> None:
        super().__init__(reader, sink, (), marks)
        self.soft = True
        self.calls: list[_KeptCall] = []

    def _open(self, name: str, given_id: str | None) -> None:
        call = _KeptCall(name, given_id)
        self.calls.append(call)
        self._keep(call.arguments.append)

    def _close(self) -> None:
        self.committed = False

    def settle(self) -> None:
        """Keeps to offered tools: with a call of any other, the answer is text."""

    def undo(self, position: int) -> None:
        self.reader.back(position)

    def perform(self) -> None:
        for call in self.calls:
            self.sink.begin(call.name, call.id)
            self.sink.arguments("".join(call.arguments))
            self.sink.end()


def decode_whole(reader: Reader, sink: Sink, marks: Patterns) -> Steps[bool]:
    """Whether all of the answer from here on is calls; if not, the reader is where it was.

    `marks` are a family's markers: where one is left over beside a call, it is nothing.
    """
    here = reader.hold()
    rehearsal = _Rehearsal(reader, sink, marks)
    found = True
    try:
        yield from _answer(rehearsal)
    except Malformed:
        # One that merely ends inside its last call is completed; a limit leaves it as it is.
        found = reader.exhausted and bool(rehearsal.calls)
        if rehearsal.committed:
            rehearsal.cut()
        else:
            found = found and reader.truncated
    if found:
        rehearsal.perform()
    else:
        reader.back(here)
    reader.release(here)
    return found


def _answer(state: _Rehearsal) -> Steps[None]:
    reader = state.reader
    while True:
        yield from _between(state)
        if not (yield from reader.peek()):
            return
        fenced = yield from reader.skip(_FENCE)
        if fenced:
            yield from reader.run(_LANGUAGE, discard)
        yield from decode_json(state, _SYNTAX)
        if fenced:
            yield from state.blanks()
            if not (yield from reader.skip(_FENCE)):
                raise Malformed("an open fence")


def _between(state: _Rehearsal) -> Steps[None]:
    """Blanks and left-over markers."""
    while True:
        yield from state.blanks()
        if not (yield from state.reader.sees_any(state.marks)):
            return
        yield from state.reader.until(state.marks, discard)
