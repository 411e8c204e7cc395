"""Grows pools and looks at what the system has given: a process of its own, since memory is a process's."""

from __future__ import annotations

import resource
import sys

from native_models import Kind

LAYERS = 6


def most() -> int:
    """Bytes that the process has held at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


def main() -> None:
    model = Kind(layers=LAYERS).native()
    pools = model.pools(1)
    layer, written = 2 * pools.page_bytes, 0
    before = most()
    for pages in (64, 96, 144, 216, 324, 486):
        pools.resize(pages)
        for memory in (*pools.keys, *pools.values):
            memory[written:pages] = 1
        written = pages
    held = pages * layer * LAYERS
    taken = most() - before
    # Two copies of one layer's keys are allowed, where the system moves no memory.
    allowed = held * (1 + 1 / LAYERS) + 2**24
    assert held > 2**26 and taken < allowed, f"{taken} bytes were taken for {held}"
    pools.resize(100 * pages)
    assert most() - before < allowed, "pages that hold nothing take room"


if __name__ == "__main__":
    main()
