"""The text inside `{"input": "…"}`, read while the JSON is still being written."""

from __future__ import annotations

import json

_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}


class InputText:
    """Reads a JSON object in pieces and gives out the text of its member `input`, as it comes."""

    def __init__(self) -> None:
        self._depth = 0
        self._string: list[str] | None = None
        """The string under way: what has been read of it."""
        self._escape: str | None = None
        """An escape under way: what has been read after its backslash."""
        self._high = ""
        """The first half of a pair of escapes that make one character."""
        self._last = ""
        """The last string at the top level: the key, when a colon follows."""
        self._key = ""
        self._is_value = False
        self.found = False
        """Whether the member is there and is a text."""

    def feed(self, piece: str) -> str:
        return "".join(self._read(char) for char in piece)

    def _read(self, char: str) -> str:
        if self._string is None:
            self._structure(char)
            return ""
        text = self._character(char)
        if text is None:
            self._last, self._string = "".join(self._string), None
            return ""
        self._string.append(text)
        return text if self._wanted else ""

    @property
    def _wanted(self) -> bool:
        return self._depth == 1 and self._is_value and self._key == "input"

    def _structure(self, char: str) -> None:
        match char:
            case '"':
                self._string = []
                self.found |= self._wanted
            case "{" | "[":
                self._depth += 1
            case "}" | "]":
                self._depth -= 1
            case ":" if self._depth == 1:
                self._key, self._is_value = self._last, True
            case "," if self._depth == 1:
                self._is_value = False

    def _character(self, char: str) -> str | None:
        """What a character inside a string stands for: a text, nothing yet, or its end (None)."""
        if self._escape is None:
            if char == "\\":
                self._escape = ""
                return ""
            return None if char == '"' else char
        self._escape += char
        if self._escape[0] != "u":
            self._escape = None
            return _ESCAPES.get(char, char)
        if len(self._escape) < 5:
            return ""
        code, self._escape = self._escape, None
        pair = f"{self._high}\\{code}"
        self._high = ""
        try:
            text = str(json.loads(f'"{pair}"'))
        except ValueError:
            return "\ufffd"
        if len(text) == 1 and "\ud800" <= text <= "\udbff":
            self._high = pair
            return ""
        return text.encode("utf-8", "replace").decode("utf-8")
