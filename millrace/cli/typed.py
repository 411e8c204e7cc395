"""Messages as they are typed in a terminal: a line, lines that end with a backslash, or a paste.

A terminal marks what is pasted if it is asked to, so that line breaks in it are not taken for the end of a
message. GNU's readline knows the marks; for the editor that Macs have in its place they are turned into
signs that stand in the text. What a message says is not looked at here.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from types import ModuleType

BEGIN, END = "␂", "␃"
"""Around a paste, where the editor does not know of pastes: signs that hardly any text has."""
_ASK, _ASK_NO_MORE = "\x1b[?2004h", "\x1b[?2004l"
_REMEMBERED = 1000


def read_message(interactive: bool) -> str:
    """One message; EOFError is the end of all, and KeyboardInterrupt goes through."""
    lines: list[str] = []
    while True:
        try:
            line = input(("... " if lines else "› ") if interactive else "")
        except EOFError:
            if not lines:
                raise
            return "\n".join(lines)
        while BEGIN in line:
            line = _pasted(line)
        if "\n" not in line and line.endswith("\\"):
            lines.append(line.removesuffix("\\"))
            continue
        return "\n".join([*lines, line])


def _pasted(line: str) -> str:
    """The line with the whole of a paste that begins in it, and what was typed behind that."""
    before, _, text = line.partition(BEGIN)
    while END not in text:
        try:
            text += "\n" + input()
        except EOFError:
            return before + text
    pasted, _, behind = text.partition(END)
    return before + pasted + behind


@contextlib.contextmanager
def line_editing() -> Iterator[None]:
    """Arrow keys, pastes, and a history across sessions, where Python has readline."""
    try:
        import readline
    except ImportError:
        yield
        return
    if not sys.stdin.isatty():
        yield
        return
    from millrace.config import home

    path = home() / "chat_history"
    with contextlib.suppress(OSError):
        readline.read_history_file(path)
    marked = _mark_pastes(readline)
    try:
        yield
    finally:
        if marked:
            _say(_ASK_NO_MORE)
        with contextlib.suppress(OSError):
            _save(readline, str(path))


def _mark_pastes(readline: ModuleType) -> bool:
    """Have pastes marked; True where the terminal is asked here and not by the editor."""
    if "libedit" not in (readline.__doc__ or ""):
        readline.parse_and_bind("set enable-bracketed-paste on")
        return False
    if (sys.stdout.encoding or "").lower().replace("-", "") != "utf8" or not sys.stdout.isatty():
        return False
    for keys, sign in (("200", BEGIN), ("201", END)):
        readline.parse_and_bind(f'bind -s "\\e[{keys}~" "{sign}"')
    _say(_ASK)
    return True


def _say(sequence: str) -> None:
    sys.stdout.write(sequence)
    sys.stdout.flush()


def _save(readline: ModuleType, path: str) -> None:
    # The file has an entry a line: what has several would come back in pieces.
    for place in reversed(range(readline.get_current_history_length())):
        if "\n" in (readline.get_history_item(place + 1) or ""):
            readline.remove_history_item(place)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    readline.set_history_length(_REMEMBERED)
    readline.write_history_file(path)
    os.chmod(path, 0o600)
