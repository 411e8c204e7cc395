"""Values on the command line: sizes like 8G, and words from a list, with errors that help."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from millrace.config import AdapterConfig, Task, home
from millrace.errors import SetupError
from millrace.sizes import bytes_in


def bytes_of(option: str, text: str | None) -> int | None:
    """`8G`, `512M`, `1.5 GiB` or plain bytes."""
    if text is None:
        return None
    try:
        return bytes_in(text)
    except ValueError as error:
        raise SetupError(f"{option} {text} {error}.") from None


_MOST_DISK = 16 << 30


def disk_of(option: str, text: str | None, folder: str | None) -> int:
    """Bytes of disk for the prefix cache: as asked, else a part of what is free."""
    asked = bytes_of(option, text)
    if asked is not None:
        return asked
    path = Path(folder).expanduser() if folder else home()
    while not path.exists() and path != path.parent:
        path = path.parent
    try:
        return min(_MOST_DISK, shutil.disk_usage(path).free // 10)
    except OSError:
        return 0


def one_of(option: str, value: str, words: Sequence[str]) -> Any:
    if value not in words:
        raise SetupError(f"{option} must be one of {', '.join(words)}, not '{value}'.")
    return value


def said(**values: float | None) -> dict[str, float]:
    """What somebody chose, of options that may be left out."""
    return {name: value for name, value in values.items() if value is not None}


def task_of(*, embed: bool, rerank: bool) -> Task:
    if embed and rerank:
        raise SetupError("--embed and --rerank cannot go together: a model does one of them.")
    return "embed" if embed else "rerank" if rerank else "auto"


def adapter_of(text: str) -> AdapterConfig:
    """`NAME=FOLDER`."""
    name, equals, path = text.partition("=")
    if not equals or not name.strip() or not path.strip():
        raise SetupError(f"--lora {text} is no adapter; write it like NAME=FOLDER.")
    return adapter_in(name.strip(), path.strip())


def adapter_in(name: str, folder: str) -> AdapterConfig:
    return AdapterConfig(name=name, path=str(Path(folder).expanduser().absolute()))
