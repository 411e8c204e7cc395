"""Reading the files of a model folder, which others wrote and nothing vouches for.

All reads of a model folder go through here: regular files only (a pipe in place of a file would block
for ever), never more than a stated number of bytes, and every fault as a ModelError that names the
file. `reads_folder` is the border: whatever else code that interprets a folder's files trips over
becomes a ModelError there, so that one broken folder is that folder's problem alone.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Concatenate, ParamSpec, TypeVar

import msgspec

from millrace.errors import MillraceError, ModelError
from millrace.sizes import format_bytes

log = logging.getLogger("millrace.models")

P = ParamSpec("P")
T = TypeVar("T")

MOST_JSON = 8 << 20
"""Bytes of a configuration file. The largest in use, with settings of every layer, have about 1 MB."""
MOST_TOKENIZER = 256 << 20
"""Bytes of a tokenizer file; those of large vocabularies have about 42 MB."""
MOST_TEXT = 4 << 20
"""Bytes of a chat template."""
MOST_FILES = 20_000
"""Entries of a model folder that are looked at."""


@contextlib.contextmanager
def interpreting(path: Path, *, writing: bool = False) -> Iterator[None]:
    """Whatever a folder or a file of others makes of its reader is a ModelError that names it.

    `writing` passes on the errors of the disk, which are then those of what is written.
    """
    try:
        yield
    except MillraceError:
        raise
    except OSError as error:
        if writing:
            raise
        raise ModelError(f"{path} cannot be read: {_why(error)}.") from error
    except BaseException as error:
        # Rust libraries report a panic as a BaseException of their own.
        if not isinstance(error, Exception) and type(error).__module__ != "pyo3_runtime":
            raise
        log.debug("%s cannot be interpreted", path, exc_info=True)
        raise ModelError(
            f"{path} cannot be interpreted ({type(error).__name__}: {_short(error)}). "
            "Fetch the model again."
        ) from error


def reads_folder(
    read: Callable[Concatenate[Path, P], T],
) -> Callable[Concatenate[Path, P], T]:
    """A function of a model folder, or of one file, that raises nothing but errors for a user's eyes."""

    @functools.wraps(read)
    def guarded(folder: Path, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with interpreting(folder):
            return read(folder, *args, **kwargs)

    return guarded


def open_regular(file: Path) -> BinaryIO:
    """Open a file for reading; raises OSError for all that is not a regular file, without blocking."""
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(0, "it is not a regular file")
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_bytes(file: Path, most: int) -> bytes:
    """All of a regular file that has at most so many bytes."""
    try:
        with open_regular(file) as opened:
            data = opened.read(most + 1)
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {_why(error)}.") from error
    if len(data) > most:
        raise ModelError(
            f"{file} is larger than {format_bytes(most)}, the most that is read of such a file. "
            "Fetch the model again."
        )
    return data


def read_text(file: Path, most: int = MOST_TEXT) -> str:
    try:
        return read_bytes(file, most).decode()
    except UnicodeDecodeError as error:
        raise ModelError(f"{file} is not UTF-8: {error.reason} at byte {error.start}.") from error


def read_json(file: Path, *, optional: bool = False, most: int = MOST_JSON) -> dict[str, Any]:
    """The JSON object in a file; an optional file that is not there is an empty one."""
    if optional and not os.path.exists(file):
        return {}
    try:
        value = json.loads(read_bytes(file, most))
    except RecursionError as error:
        raise ModelError(f"{file} is nested too deeply. Fetch the model again.") from error
    except ValueError as error:
        raise ModelError(f"{file} is not valid JSON: {error}. Fetch the model again.") from error
    if not isinstance(value, dict):
        raise ModelError(f"{file} should hold a JSON object. Fetch the model again.")
    return value


def decode_json(file: Path, kind: type[T], most: int) -> T:
    """The JSON in a file as a type; parts that the type does not have are skipped."""
    data = read_bytes(file, most)
    try:
        return msgspec.json.decode(data, type=kind)
    except RecursionError as error:
        raise ModelError(f"{file} is nested too deeply. Fetch the model again.") from error
    except (ValueError, TypeError) as error:  # msgspec's errors are ValueErrors
        raise ModelError(f"{file} is not sound: {error}. Fetch the model again.") from error


def entries(folder: Path) -> list[os.DirEntry[str]]:
    """The entries of a folder by name; raises OSError, and ModelError for a folder of too many."""
    found: list[os.DirEntry[str]] = []
    with os.scandir(folder) as scanned:
        for entry in scanned:
            found.append(entry)
            if len(found) > MOST_FILES:
                raise ModelError(f"{folder} has more than {MOST_FILES} files: it is not a model.")
    return sorted(found, key=lambda entry: entry.name)


def _why(error: OSError) -> str:
    return error.strerror or str(error)


def _short(error: BaseException) -> str:
    text = str(error)
    return text if len(text) <= 300 else f"{text[:300]}..."
