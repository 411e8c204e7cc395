"""A command in a terminal of its own, as a person would have it: what it shows, and keys for it."""

from __future__ import annotations

import codecs
import contextlib
import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Sequence

_PATIENCE = 120.0


class Typist:
    def __init__(self, arguments: Sequence[str], env: dict[str, str] | None = None) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "millrace", *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=os.environ | {"TERM": "xterm-256color", "LANG": "C.UTF-8"} | (env or {}),
            start_new_session=True,
        )
        os.close(theirs)
        self.shown = ""
        # A character may come in two parts.
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def wait_for(self, text: str, after: int = 0) -> int:
        """Until the text is on the screen, behind a place; the place behind it."""
        deadline = time.monotonic() + _PATIENCE
        while (found := self.shown.find(text, after)) < 0:
            if time.monotonic() > deadline or not self._read():
                raise AssertionError(f"{text!r} is not in {self.shown[after:]!r}")
        return found + len(text)

    def type(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def _read(self) -> bool:
        ready, _, _ = select.select([self._ours], [], [], 0.2)
        if not ready:
            return True
        try:
            got = os.read(self._ours, 65536)
        except OSError:  # the other side is closed
            return False
        self.shown += self._decoder.decode(got)
        return bool(got)

    def end(self) -> int:
        with contextlib.suppress(OSError):
            while self.process.poll() is None and self._read():
                pass
        status = self.process.wait(_PATIENCE)
        os.close(self._ours)
        return status
