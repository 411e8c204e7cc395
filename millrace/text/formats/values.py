"""Argument values on their way to JSON: read in a family's dialect, written as strict JSON text.

Well-formed JSON passes through letter for letter, as it arrives. Python literals, unescaped line
breaks, odd string delimiters and bare keys come out as JSON. Knows nothing of schemas.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

from millrace.text.formats.reader import Malformed, Reader, Steps, Write, discard
from millrace.text.stops import Patterns

_BLANK = re.compile(r"\s+")
_NUMBER = re.compile(r"[0-9+\-.eE_]+")
_NAME = re.compile(r"[\w]+")
_BARE = re.compile(r"[^,{}\[\]<\n]+")
_ATOM = re.compile(r"[\w.+\-]+")
_ENDS = {"object": "}", "list": "])", "set": "}"}
_WORDS = {"true": "true", "false": "false", "null": "null"}
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
_JSON_ESCAPES = set('"\\/bfnrt')
_PYTHON_ESCAPES = {
    "n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0",
    "\\": "\\", "'": "'", '"': '"', "/": "/", "\n": "",
}  # fmt: skip
_HEX = {"u": 4, "x": 2, "U": 8}
MAX_DEPTH = 128


@dataclass(frozen=True, slots=True)
class ValueDialect:
    """How a family writes values."""

    delimiter: str | None = None
    """A text that opens and closes strings, in which nothing is escaped."""
    python: bool = False
    """Single quotes, True/False/None, tuples; a quote closes only where a value may end."""


JSON = ValueDialect()
PYTHON = ValueDialect(python=True)


def escape(text: str) -> str:
    """`text` as the inside of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


class Value:
    """Copies one value."""

    def __init__(
        self, reader: Reader, dialect: ValueDialect, write: Write, wary: Callable[[], bool]
    ) -> None:
        self._reader = reader
        self._dialect = dialect
        self._write = write
        self._wary = wary
        self._stack: list[str] = []
        self._delimiter = Patterns([dialect.delimiter]) if dialect.delimiter else None

    def copy(self) -> Steps[None]:
        reader = self._reader
        yield from reader.run(_BLANK, discard)
        while True:
            opened = yield from self._scalar_or_open()
            if opened:
                if (yield from self._empty()):
                    opened = False
                elif self._stack[-1] == "object":
                    yield from self._key()
            if not opened:
                while self._stack:
                    ended = yield from self._next()
                    if not ended:
                        break
                else:
                    return

    def _scalar_or_open(self) -> Steps[bool]:
        """Reads a scalar, or the opening bracket of a container."""
        reader = self._reader
        char = yield from reader.peek()
        if self._dialect.delimiter and (yield from reader.skip(self._dialect.delimiter)):
            yield from self._delimited()
        elif char == '"' or (char == "'" and self._dialect.python):
            yield from self._string()
        elif char == "{":
            is_set = self._dialect.python and (yield from self._opens_set())
            reader.at += 1
            self._push("set" if is_set else "object")
            return True
        elif char == "[" or (char == "(" and self._dialect.python):
            reader.at += 1
            self._push("list")
            return True
        elif self._dialect.delimiter and char:
            yield from self._bare()
        elif char and (char in "+-." or char.isdigit()):
            yield from self._number()
        elif char.isalpha():
            yield from self._word()
        else:
            raise Malformed(char)
        return False

    def _opens_set(self) -> Steps[bool]:
        """Whether the brace here opens a set: its first element is followed by no colon."""
        reader = self._reader
        here = reader.hold()
        reader.at += 1
        yield from reader.run(_BLANK, discard)
        char = yield from reader.peek()
        found = char not in ("", "}")
        if char in ('"', "'"):
            reader.at += 1
            try:
                yield from read_string(reader, char, discard, True)
            except Malformed:
                found = False
        else:
            yield from reader.run(_ATOM, discard)
        yield from reader.run(_BLANK, discard)
        found = found and (yield from reader.peek()) != ":"
        reader.back(here)
        reader.release(here)
        return found

    def _push(self, kind: str) -> None:
        if len(self._stack) >= MAX_DEPTH:
            raise Malformed("nested too deeply")
        self._write("{" if kind == "object" else "[")
        self._stack.append(kind)

    def _closes(self, char: str) -> bool:
        return bool(char) and char in _ENDS[self._stack[-1]]

    def _close(self, blank: str = "") -> None:
        self._write(blank + ("}" if self._stack.pop() == "object" else "]"))

    def _empty(self) -> Steps[bool]:
        yield from self._reader.run(_BLANK, self._write)
        char = yield from self._reader.peek()
        if not char:
            raise Malformed("cut off")
        if self._closes(char):
            self._reader.at += 1
            self._close()
            return True
        return False

    def _next(self) -> Steps[bool]:
        """After a value inside a container: True when the container closed, False on a next one."""
        reader = self._reader
        blank: list[str] = []
        yield from reader.run(_BLANK, blank.append)
        char = yield from reader.take()
        if self._closes(char):
            self._close("".join(blank))
            return True
        if char != ",":
            raise Malformed(char)
        after: list[str] = []
        yield from reader.run(_BLANK, after.append)
        char = yield from reader.peek()
        if not char:
            raise Malformed("cut off")
        if self._closes(char):
            reader.at += 1
            self._close("".join(blank))
            return True
        lead = "".join(blank) + "," + "".join(after)
        if self._stack[-1] == "object":
            yield from self._key(lead)
        else:
            self._write(lead)
        return False

    def _key(self, lead: str = "") -> Steps[None]:
        reader = self._reader
        char = yield from reader.peek()
        if self._dialect.delimiter and (yield from reader.skip(self._dialect.delimiter)):
            self._write(lead)
            yield from self._delimited()
        elif char == '"' or (char == "'" and self._dialect.python):
            self._write(lead)
            yield from self._string(key=True)
        elif self._dialect.delimiter and (char.isalpha() or char == "_"):
            name, colon = yield from reader.collect(Patterns([":"]))
            if colon is None:
                raise Malformed("cut off")
            reader.unread(colon)
            self._write(lead + json.dumps(name.strip(), ensure_ascii=False))
        elif self._dialect.python:
            name = yield from reader.word(_ATOM)
            if not name:
                raise Malformed(char)
            self._write(lead + json.dumps(name, ensure_ascii=False))
        else:
            raise Malformed(char)
        blank: list[str] = []
        yield from reader.run(_BLANK, blank.append)
        if (yield from reader.take()) != ":":
            raise Malformed("a key without a value")
        self._write("".join(blank) + ":")
        yield from reader.run(_BLANK, self._write)

    def _delimited(self) -> Steps[None]:
        assert self._delimiter is not None
        self._write('"')
        found = yield from self._reader.until(
            self._delimiter, lambda text: self._write(escape(text))
        )
        if found is None:
            raise Malformed("cut off")
        self._write('"')

    def _string(self, key: bool = False) -> Steps[None]:
        write = self._write
        quote = yield from self._reader.take()
        if self._dialect.python and (yield from self._reader.skip(quote * 2)):
            quote *= 3
        write('"')
        python = self._dialect.python
        loose = python and not key and len(quote) == 1
        yield from read_string(
            self._reader, quote, write, python, lambda: loose and not self._wary()
        )
        write('"')

    def _bare(self) -> Steps[None]:
        """A value without delimiters: a number or a word of JSON, else the text itself."""
        text = (yield from self._reader.word(_BARE)).strip()
        known = _WORDS.get(text) or _PYTHON_WORDS.get(text)
        if not text:
            raise Malformed("no value")
        if known is None:
            try:
                known = number(text)
            except Malformed:
                known = json.dumps(text, ensure_ascii=False)
        self._write(known)

    def _number(self) -> Steps[None]:
        self._write(number((yield from self._reader.word(_NUMBER))))

    def _word(self) -> Steps[None]:
        word = yield from self._reader.word(_NAME)
        if word in _WORDS:
            self._write(word)
        elif word in _PYTHON_WORDS:
            self._write(_PYTHON_WORDS[word])
        elif self._dialect.python:
            self._write(json.dumps(word, ensure_ascii=False))
        else:
            raise Malformed(word)


def number(text: str) -> str:
    """A number as JSON writes it; JSON's own spelling is kept as it is."""
    try:
        json.loads(text)
        return text
    except ValueError:
        pass
    plain = text.replace("_", "")
    for read in (int, float):
        try:
            return json.dumps(read(plain))
        except ValueError:
            continue
    raise Malformed(text)


def read_string(
    reader: Reader,
    quote: str,
    write: Write,
    python: bool = False,
    loose: Callable[[], bool] = lambda: False,
) -> Steps[None]:
    """Writes the inside of a string, as the inside of a JSON string, up to its closing quote.

    `loose`: a quote closes only where a value may end, since some models never escape theirs.
    """
    plain = re.compile(r'[^"\'\\\x00-\x1f]+')
    while True:
        yield from reader.run(plain, write)
        char = yield from reader.peek()
        if not char:
            raise Malformed("cut off")
        if char == "\\":
            yield from _escape(reader, write, python)
        elif char == quote[0] and (yield from reader.sees(quote)):
            if not loose() or (yield from _may_end(reader)):
                reader.at += len(quote)
                return
            reader.at += 1
            write(escape(char))
        else:
            reader.at += 1
            write(escape(char))


def _may_end(reader: Reader) -> Steps[bool]:
    here = reader.hold()
    reader.at += 1
    yield from reader.run(_BLANK, discard)
    char = yield from reader.peek()
    ends = char in ("", ",", ")", "]", "}")
    if not ends and (yield from reader.word(_NAME)):
        ends = (yield from reader.peek()) == "="
    reader.back(here)
    reader.release(here)
    return ends


def _escape(reader: Reader, write: Write, python: bool) -> Steps[None]:
    pair = yield from reader.peek(2)
    if len(pair) < 2:
        raise Malformed("cut off")
    char = pair[1]
    if char in _HEX and (char == "u" or python):
        digits = (yield from reader.peek(2 + _HEX[char]))[2:]
        if len(digits) == _HEX[char] and all(c in "0123456789abcdefABCDEF" for c in digits):
            reader.at += 2 + len(digits)
            code = int(digits, 16)
            write(pair + digits if char == "u" else escape(chr(code) if code < 0x110000 else ""))
            return
    reader.at += 2
    if not python and char in _JSON_ESCAPES:
        write(pair)
    elif char in _PYTHON_ESCAPES and (python or char == "'"):
        write(escape(_PYTHON_ESCAPES[char]))
    else:
        write("\\\\" + escape(char))


def copy_unquoted(reader: Reader, write: Write) -> Steps[None]:
    """A string in either quotes: writes its own text, unescaped, as it arrives."""
    held: list[str] = []

    def decode(part: str) -> None:
        held.append(part)
        text = "".join(held)
        held.clear()
        if re.search(r"\\ud[89abAB][0-9a-fA-F]{2}\Z", text):
            held.append(text)
            return
        write(json.loads(f'"{text}"'))

    quote = yield from reader.take()
    yield from read_string(reader, quote, decode, quote == "'")
    if held:
        write(json.loads(f'"{"".join(held)}"').encode("utf-8", "replace").decode())


def copy_value(
    reader: Reader, dialect: ValueDialect, write: Write, wary: Callable[[], bool] = lambda: False
) -> Steps[None]:
    """Copies one value; when it is malformed or cut off, a part of it has been written.

    Once `wary` says so, a quote inside a string is its end, however loosely the family quotes.
    """
    yield from Value(reader, dialect, write, wary).copy()
