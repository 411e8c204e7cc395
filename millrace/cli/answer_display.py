"""Answers on a terminal while they are made: as they come, or as the Markdown that they are.

Markdown is shown block by block. A block that another one follows will not change any more and is printed
for good; only the last one is drawn anew. What a model writes cannot move the cursor, and shows as text
where it is HTML; links are shown with their addresses.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

from millrace.cli.conversation import printable

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.live import Live
    from rich.markdown import Markdown
    from rich.text import Text

_EVERY = 0.1
"""Seconds between two drawings of the last block."""
_LONGEST = 20_000
"""Characters of a block beyond which its end is drawn as it is written until it is whole."""


class AnswerDisplay(Protocol):
    def think(self, piece: str) -> None: ...

    def say(self, piece: str) -> None: ...

    def end(self) -> None:
        """Nothing more comes."""


class PlainAnswer:
    """As the model writes it; thoughts only where a person looks on."""

    def __init__(self, console: Console, *, thoughts: bool) -> None:
        self._console = console
        self._thoughts = thoughts
        self._thinking = False

    def think(self, piece: str) -> None:
        if self._thoughts:
            self._out(piece, "dim")
            self._thinking = True

    def say(self, piece: str) -> None:
        self._out("\n\n" + piece.lstrip() if self._thinking else piece)
        self._thinking = False

    def end(self) -> None:
        self._console.print()

    def _out(self, text: str, style: str | None = None) -> None:
        self._console.out(printable(text), end="", style=style, highlight=False)


class MarkdownAnswer:
    def __init__(self, console: Console) -> None:
        self._console = console
        self._thought = PlainAnswer(console, thoughts=True)
        self._thinking = False
        self._rest = ""
        """What is not printed for good."""
        self._printed = False
        self._live: Live | None = None
        self._drawn = 0.0

    def think(self, piece: str) -> None:
        if not self._thinking:
            self._finish()
        self._thinking = True
        self._thought.think(piece)

    def say(self, piece: str) -> None:
        if self._thinking:
            self._console.print("\n")
            self._thinking = False
        self._rest += printable(piece)
        if time.monotonic() - self._drawn >= _EVERY:
            self._draw()

    def end(self) -> None:
        if self._thinking:
            self._console.print()
        self._finish()

    def _draw(self) -> None:
        from rich.live import Live

        if self._live is None:
            self._live = Live(console=self._console, transient=True, auto_refresh=False)
            self._live.start()
        done, self._rest = finished(self._rest)
        self._print(done)
        self._live.update(_End(self._unfinished()), refresh=True)
        self._drawn = time.monotonic()

    def _unfinished(self) -> Markdown | Text:
        from rich.text import Text

        rest = self._rest
        return rendered(rest) if len(rest) <= _LONGEST else Text(rest[-_LONGEST:])

    def _finish(self) -> None:
        """Print what is left for good."""
        if self._live is not None:
            self._live.stop()
            self._live = None
        rest, self._rest = self._rest, ""
        self._print(rest)
        self._printed = False

    def _print(self, text: str) -> None:
        if not text.strip():
            return
        if self._printed:
            self._console.print()
        self._console.print(rendered(text))
        self._printed = True


class _End:
    """As much of the end of a text as there is room for."""

    def __init__(self, text: Markdown | Text) -> None:
        self._text = text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.segment import Segment

        lines = console.render_lines(self._text, options, pad=False)
        for line in lines[-max(1, console.height - 1) :]:
            yield from line
            yield Segment.line()


def finished(text: str) -> tuple[str, str]:
    """The blocks of a text that nothing can change any more, and the rest."""
    parser = _parser().disable("inline")
    begins = [t.map[0] for t in parser.parse(text) if t.level == 0 and t.map and t.nesting >= 0]
    if len(begins) < 2:
        return "", text
    lines = text.split("\n")
    return "\n".join([*lines[: begins[-1]], ""]), "\n".join(lines[begins[-1] :])


def rendered(text: str) -> Markdown:
    from rich.markdown import Markdown

    shown = Markdown("", code_theme="ansi_dark", hyperlinks=False)
    shown.parsed = _parser().parse(text)
    for token in shown.parsed:
        for child in token.children or ():
            if child.type == "softbreak":
                child.type = "hardbreak"  # a line of a poem is a line
    return shown


def _parser() -> MarkdownIt:
    from markdown_it import MarkdownIt

    return MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"])
