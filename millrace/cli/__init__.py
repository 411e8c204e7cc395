"""The command line. Each command lives in a module of its own and imports what it needs late,
so that `millrace --help` is instant and `millrace serve` wastes no time before it starts the engine.
"""

from __future__ import annotations


def main() -> None:
    from millrace.cli.app import run

    run()
