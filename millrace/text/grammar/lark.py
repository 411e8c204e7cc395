"""Writing llguidance grammars: rules in Lark, special tokens by id, JSON schemas beside them.

Owns how text becomes a Lark literal: what the vocabulary holds as one special token must be matched
as that token, since its letters can never be generated.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from millrace.errors import BadRequest

Entry = dict[str, Any]
"""One llguidance grammar: `{"json_schema": …}` or `{"lark_grammar": …}`."""

LONGEST = 1024 * 1024
"""Characters of a grammar, schemas included."""
UNFORCED = '%llguidance {"no_forcing": true}\n'
"""Has llguidance not work out ahead, for every mask anew, all of a text that can only go one way:
with a long one (`x{100000}`) that takes seconds."""
_LONG = 8192
"""Characters of a grammar from which on it may hold such a text."""


def refuse_long(length: int, param: str | None) -> None:
    if length > LONGEST:
        raise BadRequest(
            f"The form of the answer in '{param}' is {length} characters long; the most are "
            f"{LONGEST}.",
            param=param,
        )


def quoted(text: str) -> str:
    return json.dumps(text)


def pattern(regex: str) -> str:
    """A regular expression between slashes, as Lark wants it."""
    return "/" + re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", regex).replace("\n", r"\n") + "/"


class Builder:
    """Collects rules and schemas, and puts them together as one grammar."""

    def __init__(self, tokens: Mapping[str, int] | None = None) -> None:
        self._tokens = dict(tokens or {})
        words = sorted((t for t in self._tokens if t), key=len, reverse=True)
        self._split = re.compile("|".join(map(re.escape, words))) if words else None
        self._rules: dict[str, str] = {}
        self._entries: list[Entry] = []
        self._names: dict[str, str] = {}
        self.known: dict[tuple[int, str], str] = {}
        """Rules by the schema they are for, so that a schema may refer to itself."""

    def pieces(self, text: str) -> list[tuple[str, int | None]]:
        """`text` cut at its special tokens: letters with None, tokens with their id."""
        found: list[tuple[str, int | None]] = []
        at = 0
        for match in self._split.finditer(text) if self._split is not None else ():
            if match.start() > at:
                found.append((text[at : match.start()], None))
            found.append((match.group(), self._tokens[match.group()]))
            at = match.end()
        if at < len(text):
            found.append((text[at:], None))
        return found

    def literal(self, text: str) -> str:
        """An expression that matches exactly `text`.

        Blanks are lexemes of their own: llguidance's lexer takes the longest lexeme and does not
        turn back, so a separator must not be the beginning of what may stand there instead.
        """
        parts: list[str] = []
        for piece, token in self.pieces(text):
            if token is not None:
                parts.append(f"<[{token}]>")
            else:
                parts += [quoted(part) for part in re.split(r"(\s+)", piece) if part]
        return " ".join(parts) or '""'

    def until(self, name: str, close: str, regex: str = r"(.|\n)*") -> str:
        """A rule for free text that ends with `close`, which it consumes."""
        pieces = self.pieces(close)
        head, token = pieces[0]
        if token is not None:
            self.rule(name, f"{pattern(regex)} {self.literal(close)}")
            return name
        rest = self.literal(close[len(head) :]) if len(pieces) > 1 else ""
        self._rules[f"{name}_text[suffix={quoted(head)}]"] = pattern(regex)
        self.rule(name, f"{name}_text {rest}".strip())
        return name

    def rule(self, name: str, expression: str) -> str:
        self._rules[name] = expression
        return name

    def schema(self, schema: Any) -> str:
        """A reference to the grammar of a JSON schema."""
        return self.entry({"json_schema": schema})

    def entry(self, entry: Entry) -> str:
        key = json.dumps(entry, sort_keys=True)
        if key not in self._names:
            self._names[key] = f"g{len(self._entries)}"
            self._entries.append({"name": self._names[key], **entry})
        return "@" + self._names[key]

    def build(self) -> str:
        """The grammar, for an LLMatcher; the rule `start` is where it begins."""
        text = "\n".join(f"{name}: {expression}" for name, expression in self._rules.items())
        return _joined(text + "\n", self._entries)


def single(entry: Entry) -> str:
    """A grammar that is one entry and nothing else."""
    alone = json.dumps({"grammars": [entry]})
    if len(alone) <= _LONG or "lark_grammar" in entry:
        return alone
    return _joined("start: @whole\n", [{"name": "whole", **entry}])


def _joined(text: str, entries: list[Entry]) -> str:
    plain = json.dumps({"grammars": [{"lark_grammar": text}, *entries]})
    if len(plain) <= _LONG:
        return plain
    return json.dumps({"grammars": [{"lark_grammar": UNFORCED + text}, *entries]})
