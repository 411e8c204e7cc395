"""From the name a user gives to a model folder that is whole.

Knows the order in which names are tried; fetching, converting and listing are done elsewhere.
Whatever is already on this machine is used without a network call and without heavy imports.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

import msgspec

from millrace.errors import ModelError, NoSuchModel
from millrace.models import auto, short_names, store
from millrace.models.description import missing_file
from millrace.models.fetch import Progress, build, default_gguf, hub_snapshot, is_ready, silent
from millrace.models.short_names import ShortName
from millrace.models.store import Source

__all__ = ["DEFAULT", "Progress", "Resolved", "resolve", "silent"]

DEFAULT = "smollm2"

_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$", re.ASCII)
_HUB_PAGE = re.compile(
    r"^(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/([^/?#]+/[^/?#]+)(?:/tree/main)?/?(?:[?#].*)?$"
)
"""What a browser shows above a model, which people copy."""
_PATH_STARTS = ("/", "./", "../", "~")


class Resolved(msgspec.Struct, frozen=True):
    """A model that is ready to be loaded, and the name to serve it under."""

    name: str
    path: Path
    source: Source
    aliases: tuple[str, ...] = ()
    """Further names to serve it under."""
    note: str = ""
    """What the user should know of the choice, where one was made."""


def resolve(
    name: str | None,
    *,
    progress: Progress = silent,
    download: bool = True,
    memory: int | None = None,
) -> Resolved:
    """Find the model called `name`, fetching or converting it if need be and if allowed.

    None is the default model. Names are tried as the default, a path, a model on this machine,
    a Hugging Face id, and a short name; `auto` is the best model that fits into `memory` bytes, or
    into what this machine has.
    """
    if name is None or name == DEFAULT:
        return _default(progress, download)
    try:
        path = Path(name).expanduser()
    except (RuntimeError, ValueError):  # the home of somebody who has none
        raise NoSuchModel(f"There is no file or folder {name}. Check the path.") from None
    if os.path.isfile(path) or (path.suffix == ".gguf" and name.startswith(_PATH_STARTS)):
        return _file(path, progress)
    if name and os.path.isdir(path):
        return _folder(path)
    if (own := store.own_folder(name)) is not None:
        return _own(name, own)
    if (page := _HUB_PAGE.match(name)) is not None:
        name = page[1]
    if "://" in name:
        raise ModelError(
            f"Models are not fetched from addresses such as {name}. Name a Hugging Face id such as "
            f"org/name, or download the file and name its path."
        )
    if name.startswith(_PATH_STARTS) or name.endswith((".gguf", ".safetensors")):
        raise NoSuchModel(f"There is no file or folder {name}. Check the path.")
    if _HUB_ID.match(name):
        return _hub(name, progress, download)
    if name == short_names.AUTO:
        return _auto(progress, download, memory)
    if (short := short_names.find(name)) is not None:
        return _short(short, progress, download)
    raise _unknown(name)


def _unknown(name: str) -> NoSuchModel:
    local = [DEFAULT, *(n for n in store.names() if n != DEFAULT)]
    known = f"There is no model '{name}'. {short_names.meant(name, local)}".rstrip()
    return NoSuchModel(
        f"{known} On this machine: {', '.join(local)}. Others can be named by a short name such as "
        f"qwen3-4b, a Hugging Face id such as org/name, a folder, or a GGUF file."
    )


def _short(model: ShortName, progress: Progress, download: bool) -> Resolved:
    found = _hub(model.source, progress, download)
    return msgspec.structs.replace(found, name=model.name, aliases=(model.source,))


def _auto(progress: Progress, download: bool, memory: int | None) -> Resolved:
    if download:
        progress("Choosing a model for this machine", 0, None)
    choice = auto.choose(memory, download=download)
    short = short_names.find(choice.name or "")
    if short is not None:
        found = _short(short, progress, download)
    else:
        found = resolve(choice.name, progress=progress, download=download)
    return msgspec.structs.replace(found, note=choice.reason)


_DEFAULT_SINCE = 2
"""The format since which its folder has been the same; an older one is fetched and made again."""
_DEFAULT_SAMPLING = {"temperature": 0.2, "top_p": 0.9}
"""What SmolLM2's authors recommend; a model this small rambles at a temperature of 1."""


def _default(progress: Progress, download: bool) -> Resolved:
    folder = store.models_home() / DEFAULT
    if not is_ready(folder, since=_DEFAULT_SINCE):
        if not download:
            raise ModelError(
                f"The default model is not on this machine yet. Fetch it: millrace pull {DEFAULT}"
            )

        def make(scratch: Path, target: Path) -> None:
            source = default_gguf(scratch, progress)
            _convert(source, target, DEFAULT, progress, _DEFAULT_SAMPLING)

        folder = build(
            DEFAULT, make, source="default", origin="SmolLM2-135M-Instruct", progress=progress
        )
    return Resolved(DEFAULT, folder, "default")


def _file(path: Path, progress: Progress) -> Resolved:
    if path.suffix != ".gguf":
        raise ModelError(
            f"{path} is a file, but not a .gguf one. Name a model folder or a GGUF file."
        )
    if not os.path.isfile(path):
        raise ModelError(f"There is no file {path}. Check the path.")
    path = path.resolve()
    status = path.stat()
    mark = hashlib.sha256(f"{path}\0{status.st_size}\0{status.st_mtime_ns}".encode()).hexdigest()
    stem = re.sub(r"[^\w.-]+", "-", path.stem).strip(".-") or "model"
    name = f"{stem}-{mark[:8]}"
    folder = store.models_home() / name
    if not is_ready(folder):

        def make(scratch: Path, target: Path) -> None:
            _convert(path, target, path.name, progress)

        folder = build(name, make, source="gguf", origin=str(path), progress=progress)
    return Resolved(path.stem, folder, "gguf")


def _convert(
    source: Path,
    target: Path,
    name: str,
    progress: Progress,
    sampling: dict[str, float] | None = None,
) -> None:
    from millrace.models.gguf import convert

    def done(read: int, total: int) -> None:
        progress(f"Converting {name}", read, total)

    convert(source, target, sampling=sampling, done=done)


def _folder(path: Path) -> Resolved:
    if (missing := missing_file(path)) is not None:
        hint = " It holds GGUF files; name one of them instead." if any(path.glob("*.gguf")) else ""
        raise ModelError(f"The model folder {path} is incomplete: {missing} is missing.{hint}")
    return Resolved(path.resolve().name, path, "folder")


def _own(name: str, folder: Path) -> Resolved:
    if (missing := missing_file(folder)) is not None:
        raise ModelError(
            f"The model '{name}' is incomplete: {missing} is missing from {folder}. "
            f"Remove it with 'millrace rm {name}' and import it again."
        )
    note = store.marker(folder)
    return Resolved(name, folder, note.source if note else "folder")


def _hub(name: str, progress: Progress, download: bool) -> Resolved:
    folder = store.hub_folder(name)
    if folder is None or missing_file(folder) is not None:
        if not download:
            state = "on" if folder is None else "whole on"
            raise ModelError(
                f"The model '{name}' is not {state} this machine. Fetch it: millrace pull {name}"
            )
        folder = hub_snapshot(name, progress)
        if (missing := missing_file(folder)) is not None:
            raise ModelError(
                f"The Hugging Face model '{name}' has no {missing}, so it cannot be served. "
                f"Take a repository with safetensors weights, or download a .gguf file and "
                f"name its path."
            )
    return Resolved(name, folder, "hub")
