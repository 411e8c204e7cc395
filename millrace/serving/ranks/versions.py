"""What a rank runs, and whether another runs the same."""

from __future__ import annotations

import sys
from importlib import metadata

from millrace.version import __version__


def here() -> dict[str, str]:
    found = {"millrace": __version__, "python": sys.version.split()[0]}
    for name in ("mlx", "mlx-lm"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def others(theirs: dict[str, str]) -> str:
    """What another runs in other versions, in words; empty if nothing. Python may be any."""
    mine = here()
    differ = [name for name in mine if name != "python" and theirs.get(name) != mine[name]]
    return ", ".join(f"{n} {theirs.get(n, 'missing')} (here {mine[n]})" for n in differ)
