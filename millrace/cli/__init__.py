"""The command line. Each command lives in a module of its own and imports what it needs late,
so that `millrace --help` is instant and `millrace serve` wastes no time before it starts the engine.
"""

from __future__ import annotations

import contextlib
import os
import sys


def main() -> None:
    from millrace.cli.app import run

    with contextlib.suppress(OSError):  # a folder that is gone has no files either
        if not {"", os.getcwd()} & set(sys.path):
            # Engines are Python programs that start in this folder: a random.py in there is not Python's.
            os.environ.setdefault("PYTHONSAFEPATH", "1")
    run()
