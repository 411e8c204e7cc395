"""The incremental machine that runs a format's declaration over an answer, whatever its family.

One parser per answer: text in, typed pieces out, in order. It owns where reasoning, calls and
content begin and end; how a call is spelled belongs to the decoders, and blanks, ids and unknown
tools to the sink.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from millrace.text.deltas import Piece
from millrace.text.formats.channels import Router
from millrace.text.formats.decoding import PARAGRAPH, Decoding
from millrace.text.formats.json_calls import decode_header, decode_json
from millrace.text.formats.pythonic import decode_python
from millrace.text.formats.reader import Malformed, Reader, Steps, Write
from millrace.text.formats.sink import Sink, random_id
from millrace.text.formats.syntax import (
    CallSyntax,
    HeaderCalls,
    JsonCalls,
    OutputFormat,
    PythonCalls,
    TaggedCalls,
)
from millrace.text.formats.tables import inside_call, tables
from millrace.text.formats.tagged import decode_tagged
from millrace.text.formats.tools import ToolSpec
from millrace.text.formats.whole_answer import OPENINGS as WHOLE_OPENINGS
from millrace.text.formats.whole_answer import decode_whole
from millrace.text.stops import Patterns


def primer(format: OutputFormat, prompt: str) -> str:
    """The markup at the end of a prompt inside which the answer begins; empty if there is none."""
    tail = prompt.rstrip()
    opens = format.thought.opens if format.thought is not None else ()
    found = [text for text in (*format.primers, *opens) if text and tail.endswith(text.rstrip())]
    return max(found, key=len, default="")


def inside_thought(format: OutputFormat, prompt: str) -> bool:
    """Whether the answer to this prompt begins inside a thought."""
    thought = format.thought
    return thought is not None and primer(format, prompt).endswith(thought.opens)


class OutputParser:
    """Reads one answer. `prompt` is the rendered prompt or its tail; `tools` those offered."""

    def __init__(
        self,
        format: OutputFormat,
        tools: Iterable[ToolSpec] | None = None,
        *,
        prompt: str = "",
        parallel: bool = True,
        new_id: Callable[[], str] = random_id,
    ) -> None:
        self._format = format
        self._reader = Reader()
        self._sink = Sink(tools, parallel=parallel, new_id=new_id)
        self._tables = tables(format, tuple(self._sink.tools))
        self._state = Decoding(self._reader, self._sink, self._tables.anchors, self._tables.marks)
        self._primed = primer(format, prompt)
        self._thinking = False
        self._priming = False
        self._steps = self._run()
        self._over = False
        if self._primed:
            self.feed(self._primed)

    @property
    def thinking(self) -> bool:
        """Whether the text read last belongs to a thought."""
        return self._thinking

    def feed(self, text: str) -> list[Piece]:
        self._reader.feed(text)
        self._advance()
        return self._sink.drain()

    def prime(self, text: str) -> None:
        """Reads the part of an answer that the prompt already holds, and passes none of it on."""
        self._priming = True
        self.feed(text)
        self._priming = False
        self._sink.content.settle()
        self._sink.reasoning.settle()

    def finish(self, truncated: bool = False) -> list[Piece]:
        """The rest, once the answer is over; `truncated` when a limit cut it."""
        self._reader.end(truncated)
        self._advance()
        self._sink.finish()
        return self._sink.drain()

    def _advance(self) -> None:
        if not self._over:
            try:
                next(self._steps)
            except StopIteration:
                self._over = True

    def _run(self) -> Steps[None]:
        if self._format.messages is not None:
            router = Router(
                self._format.messages, self._state, self._primed != "", self._body, self._at_start
            )
            yield from router.run(self._set_thinking)
        else:
            yield from self._body(Patterns([]))

    def _set_thinking(self, thinking: bool) -> None:
        self._thinking = thinking

    def _body(self, ends: Patterns) -> Steps[str | None]:
        """Content with thoughts and calls in it, up to one of `ends`; returns which."""
        tables, sink = self._tables, self._sink
        plain, retry, broken = tables.content, tables.retry, tables.broken
        if ends.patterns:
            plain = Patterns([*plain.patterns, *ends.patterns])
            retry = Patterns([*retry.patterns, *ends.patterns])
            broken = Patterns([*broken.patterns, *ends.patterns])
        patterns = plain
        yield from self._at_start()
        while True:
            marker = yield from self._reader.until(patterns, sink.content)
            if marker is None:
                return None
            if marker in ends.patterns:
                sink.marker()
                return marker
            patterns_before, patterns = patterns, plain
            if marker in tables.thought_opens:
                sink.marker()
                yield from self._thought()
                yield from self._at_start()
            elif marker in tables.opens:
                sink.marker()
                if not (yield from self._call(tables.opens[marker])):
                    patterns = broken
            elif marker in tables.soft or marker in tables.again:
                if not (yield from self._soft_call(marker)):
                    self._verbatim(marker)
                    patterns = retry if patterns_before is not broken else broken
            elif marker in tables.resets:
                sink.content(marker)
            elif marker in tables.tails:
                yield from self._tail(marker, sink.content)
            else:
                sink.marker()
                if marker in tables.inner:
                    patterns = broken

    def _tail(self, marker: str, write: Write) -> Steps[None]:
        """Markup that goes on up to a certain text; without that it is none."""
        here = self._reader.hold()
        end = self._tables.tails[marker]
        try:
            _, found = yield from self._state.header(Patterns([end, "\n"]))
        except Malformed:
            found = "\n"
        self._reader.release(here)
        if found in (end, None) or self._reader.truncated:
            self._sink.marker()
        else:
            self._reader.back(here)
            if marker not in self._format.drops:
                write(marker)

    def _verbatim(self, marker: str) -> None:
        if self._reader.at > len(self._primed):
            self._sink.content(marker)

    def _at_start(self) -> Steps[None]:
        """A call without any marker may stand where content begins."""
        tables, reader = self._tables, self._reader
        if not self._sink.tools:
            return
        here = reader.hold()
        yield from self._state.blanks()
        char = yield from reader.peek()
        found = False
        if not self._priming:
            found = char in tables.start and (yield from self._call(tables.start[char], soft=True))
            if not found and char in WHOLE_OPENINGS:
                found = yield from decode_whole(reader, self._sink, tables.ignored)
        if not found:
            reader.back(here)
        reader.release(here)

    def _thought(self) -> Steps[None]:
        tables, sink = self._tables, self._sink
        self._thinking = True
        patterns = tables.thought
        while True:
            marker = yield from self._reader.until(patterns, sink.reasoning)
            if marker is None:
                return
            if marker in tables.opens or marker in tables.again:
                if marker in tables.opens:
                    found = yield from self._call(tables.opens[marker], offered=True)
                else:
                    found = yield from self._soft_call(marker)
                if not found:
                    if marker not in self._format.drops:
                        sink.reasoning(marker)
                    patterns = tables.broken_thought
                    continue
            elif marker in tables.tails:
                yield from self._tail(marker, sink.reasoning)
                continue
            elif marker not in tables.thought_closes:
                continue
            sink.marker()
            self._thinking = False
            return

    def _soft_call(self, marker: str) -> Steps[bool]:
        """A call whose opening is plain text unless an offered tool is really called."""
        after = self._reader.at
        for syntax in self._tables.soft.get(marker) or self._tables.again[marker]:
            inside = inside_call(marker, [syntax])
            self._reader.back(after - len(marker) if inside else after)
            if (yield from self._call([syntax], soft=True)):
                return True
            self._reader.back(after)
        return False

    def _call(
        self, candidates: list[CallSyntax], soft: bool = False, offered: bool = False
    ) -> Steps[bool]:
        """Tries the syntaxes one after another; where none fits, the reader is where it was."""
        reader, state = self._reader, self._state
        here = reader.hold()
        done = False
        for syntax in candidates:
            state.committed, state.soft = False, soft or offered
            try:
                yield from decode(state, syntax)
                done = True
                if self._format.echoes and syntax.closes:
                    yield from self._skip_echo(reader.since(here).strip(), syntax.closes[0])
            except Malformed:
                if reader.truncated:
                    if state.committed:
                        state.cut()
                    reader.drop_rest()
                    done = True
                elif state.committed:
                    state.cut()
                    yield from self._recover(syntax)
                    done = True
            if done:
                break
            reader.back(here)
        reader.release(here)
        return done

    def _skip_echo(self, body: str, close: str) -> Steps[None]:
        """Skips the closing mark of a call and, right after it, the call's text once more."""
        reader, state = self._reader, self._state
        yield from state.closing(close)
        here = reader.hold()
        yield from state.blanks()
        found = yield from reader.skip(body)
        reader.release(here)
        if not found:
            state.undo(here)

    def _recover(self, syntax: CallSyntax) -> Steps[None]:
        """Drops the rest of a call that went wrong after it had begun."""
        fence = syntax.fence if isinstance(syntax, JsonCalls | PythonCalls) else ""
        ends = (fence,) if fence else () if syntax.closes else (PARAGRAPH,)
        if (yield from self._state.recover(ends)) == fence != "":
            self._reader.at += len(fence)


def decode(state: Decoding, syntax: CallSyntax) -> Steps[None]:
    if isinstance(syntax, JsonCalls):
        yield from decode_json(state, syntax)
    elif isinstance(syntax, HeaderCalls):
        yield from decode_header(state, syntax)
    elif isinstance(syntax, TaggedCalls):
        yield from decode_tagged(state, syntax)
    else:
        yield from decode_python(state, syntax)
