"""File descriptors: raising the limit of this process, and saying in words that it is too low.

Every connection, engine and open file takes one. Systems begin with a low soft limit (256 on macOS, 1024 on
most Linux systems) which a process may raise to the hard one.
"""

from __future__ import annotations

import errno
import logging
import sys

from millrace.errors import SetupError

try:
    import resource
except ImportError:  # not every Python has it; then there is no limit that could be known
    resource = None  # type: ignore[assignment]

log = logging.getLogger("millrace")

LEAST = 128
"""What a server needs for itself, one engine and a few clients."""
_WANTED = (65_536, 24_576, 10_240)
"""Tried in this order: macOS names no hard limit, and refuses what is beyond its own (OPEN_MAX, 10,240)."""
_SCARCE = (errno.EMFILE, errno.ENFILE)
_REMEDY = (
    "Raise it where the server is started: 'ulimit -n 65536' in a shell, LimitNOFILE= in a systemd unit, "
    "NumberOfFiles under SoftResourceLimits and HardResourceLimits in a launchd file, "
    "'--ulimit nofile=65536' for a container."
)


def raise_limit() -> int:
    """Raise the soft limit as far as is of use; returns what it is then."""
    if resource is None:
        return limit()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for wanted in _WANTED:
        target = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        if soft == resource.RLIM_INFINITY or soft >= target:
            break
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
        except (ValueError, OSError):
            continue
        log.debug("the limit of open files is raised from %d to %d", soft, target)
        break
    return limit()


def hold() -> None:
    """Have mlx-lm leave the limit alone, which it sets to 2048 (hard: 4096) when it is imported.

    That lowers a higher one for good, and where the hard limit is below 4096 it is an error for all but
    root, so that no engine could start.
    """
    if resource is None:
        return
    original = resource.setrlimit
    if getattr(original, "__name__", "") == "_held":
        return

    def _held(kind: int, limits: tuple[int, int], /) -> None:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if kind == resource.RLIMIT_NOFILE and str(caller).startswith("mlx_lm"):
            raise_limit()
        else:
            original(kind, limits)

    resource.setrlimit = _held


def limit() -> int:
    """How many descriptors this process may have."""
    if resource is None:
        return _WANTED[0]
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _WANTED[0] if soft == resource.RLIM_INFINITY else soft


def shortage(needed: int, what: str) -> str | None:
    """That the limit is too low for what is to be done, in words; None if it is not."""
    if limit() >= needed:
        return None
    return f"{what} needs {needed} open files, and {_limit()}. {_REMEDY}"


def check(what: str) -> None:
    """Raise that the limit is too low for a server."""
    if (short := shortage(LEAST, what)) is not None:
        raise SetupError(short)


def explain(error: BaseException) -> str:
    """An error in words; one of too few descriptors with the limit and the remedy."""
    if getattr(error, "errno", None) not in _SCARCE:
        return str(error)
    if getattr(error, "errno", None) == errno.ENFILE:
        return f"{error}: the whole system has no descriptors left"
    return f"{error}: {_limit()}. {_REMEDY}"


def _limit() -> str:
    if resource is None:
        return "the limit of open files is unknown"
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = "none" if hard == resource.RLIM_INFINITY else str(hard)
    return f"the limit of open files (RLIMIT_NOFILE) is {soft}, its hard limit {most}"
