"""What models lie on this machine: those that millrace made in its own home, and the Hugging Face cache."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from millrace.config import home
from millrace.errors import ModelError
from millrace.models.description import folder_bytes, inspect, missing_file
from millrace.models.files import read_bytes
from millrace.models.window import is_candidate, read_config

MARKER = "millrace.json"
REMOVED = ".removed-"
_MOST_NOTE = 64 << 10

Source = Literal["default", "folder", "hub", "gguf"]

_SENTENCES = "modules.json"
"""What sentence-transformers write into a folder: the model makes embeddings."""
_SPOKEN = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")


class Marker(msgspec.Struct, frozen=True):
    """What millrace notes in a folder it made: by which rules, and out of what."""

    format: int
    source: Source
    origin: str


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the list of models."""

    name: str
    path: str
    bytes: int
    architecture: str
    quantization: str
    context: int | None
    source: Source
    error: str | None = None
    """Why it cannot be served: its files are broken or missing."""


def models_home() -> Path:
    return home() / "models"


def marker(folder: Path) -> Marker | None:
    try:
        return msgspec.json.decode(read_bytes(folder / MARKER, _MOST_NOTE), type=Marker)
    except (ModelError, ValueError, RecursionError):
        return None


def own_folder(name: str) -> Path | None:
    """The folder of a model millrace made, by its name or by the name of the file it came from."""
    if not name or "/" in name or name.startswith("."):
        return None
    exact = models_home() / name
    if is_candidate(exact):
        return exact
    same = [f for f in _own_folders() if (m := marker(f)) and Path(m.origin).stem == name]
    return same[0] if len(same) == 1 else None


def hub_folder(name: str) -> Path | None:
    """The cached snapshot of a Hugging Face model's main branch, whole or not."""
    repo = _hub_cache() / f"models--{name.replace('/', '--')}"
    try:
        commit = read_bytes(repo / "refs" / "main", _MOST_NOTE).decode("ascii").strip()
    except (ModelError, ValueError):  # no file has such a name, or it holds no commit
        return None
    folder = repo / "snapshots" / commit
    return folder if commit.isalnum() and os.path.isdir(folder) else None


def is_whole_in_hub(name: str) -> bool:
    """Whether a Hugging Face model has been fetched, with all of its files."""
    folder = hub_folder(name)
    try:
        return folder is not None and missing_file(folder) is None
    except ModelError:
        return False


def local_models() -> list[Model]:
    """Every model on this machine, by name; broken ones with the reason."""
    found = []
    for folder in _own_folders():
        note = marker(folder)
        found.append(_line(folder.name, folder, note.source if note else "folder"))
    for name in _hub_names():
        folder_or_none = hub_folder(name)
        if folder_or_none is not None and _is_model(folder_or_none):
            found.append(_line(name, folder_or_none, "hub"))
    return sorted(found, key=lambda model: model.name)


def places() -> list[Path]:
    """The folders in which models lie."""
    return [models_home(), _hub_cache()]


def names() -> list[str]:
    return [model.name for model in local_models()]


def remove(name: str) -> int:
    """Delete a model from this machine, also from the cache that other programs share; returns the
    bytes given back."""
    if (own := own_folder(name)) is not None:
        return remove_own(own)
    if hub_folder(name) is None:
        raise ModelError(
            f"There is no model '{name}' on this machine to remove. "
            f"Here are: {', '.join(names()) or 'none'}."
        )
    folder = _hub_cache() / f"models--{name.replace('/', '--')}"
    size = folder_bytes(folder)
    with _removing(folder):
        shutil.rmtree(folder)
    return size


def remove_own(folder: Path) -> int:
    """Delete a folder of millrace's own models; returns the bytes given back.

    Of a link, the link alone goes: what it leads to is not millrace's.
    """
    if folder.parent != models_home():
        raise ModelError(f"{folder} is not one of millrace's own models.")
    with _removing(folder):
        if folder.is_symlink():
            folder.unlink()
            return 0
        size = folder_bytes(folder)
        shutil.rmtree(folder.rename(folder.with_name(f"{REMOVED}{folder.name}-{os.getpid()}")))
    return size


@contextlib.contextmanager
def _removing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ModelError(f"{folder} cannot be removed: {error.strerror or error}.") from None


def _line(name: str, folder: Path, source: Source) -> Model:
    found = inspect(folder)
    if (about := found.about) is None:
        return Model(
            name=name,
            path=str(folder),
            bytes=folder_bytes(folder),
            architecture="unknown",
            quantization="unknown",
            context=None,
            source=source,
            error=found.error,
        )
    return Model(
        name=name,
        path=str(folder),
        bytes=about.bytes,
        architecture=about.architecture,
        quantization=about.quantization or about.dtype,
        context=about.context,
        source=source,
    )


def _own_folders() -> list[Path]:
    try:
        names = sorted(os.listdir(models_home()))
    except OSError:
        return []
    shown = (models_home() / n for n in names if not n.startswith(".") and _is_text(n))
    return [folder for folder in shown if is_candidate(folder)]


def _is_text(name: str) -> bool:
    """Whether a name can be written at all: file systems take bytes that are no UTF-8."""
    return not any("\ud800" <= character <= "\udfff" for character in name)


def _hub_cache() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def _hub_names() -> list[str]:
    try:
        names = sorted(os.listdir(_hub_cache()))
    except OSError:
        return []
    return [
        name.removeprefix("models--").replace("--", "/", 1)
        for name in names
        if name.startswith("models--") and "--" in name[8:] and _is_text(name)
    ]


def _is_model(folder: Path) -> bool:
    """Whether a snapshot of the hub's is to be listed: a model that can be asked, or a broken one.

    Other programs fetch single files into the same cache: a snapshot that is only not whole is no model.
    """
    try:
        if missing_file(folder) is not None:
            return False
        config = read_config(folder)
    except ModelError:
        return True
    classes = config.get("architectures") or []
    spoken = not classes or any(str(c).endswith(_SPOKEN) for c in classes)
    return "model_type" in config and (spoken or (folder / _SENTENCES).is_file())
