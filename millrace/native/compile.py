"""From emitted kernels to machine code for this processor, kept on disk.

What is compiled is an object file by the name of its kernels, behind its checksum, and lies in a folder
named after the sources of this package, LLVM's version and the processor: a new version or another machine
compiles anew, and so does one that finds the file damaged.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import inspect
import logging
import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite
import llvmlite.binding as llvm
from llvmlite import ir

from millrace.config import home
from millrace.native.emit import FLOAT, LONG, Emitter

log = logging.getLogger("millrace.native")

Body = Callable[..., None]
"""Writes a kernel: it gets the emitter and the kernel's arguments."""
FLOAT_ARGUMENTS = {"eps", "factor"}
"""Arguments by these names are floats; all others are addresses and counts."""


class Code:
    """Kernels in memory, by name."""

    def __init__(self, engine: Any, names: list[str]) -> None:
        self._engine = engine
        self.address = {name: int(engine.get_function_address(name)) for name in names}


@cache
def processor() -> tuple[str, str]:
    """The processor's name, and what it can do, as LLVM names them."""
    _start()
    features: str = llvm.get_host_cpu_features().flatten()
    return str(llvm.get_host_cpu_name()), features


@cache
def multiplies_by_lanes() -> bool:
    """Whether a product takes one float of a vector for all its lanes at no cost, as NEON's do: to spread a
    float from memory costs as much as a product there."""
    return platform.machine().lower() in ("aarch64", "arm64")


@cache
def has_tables() -> bool:
    """Whether vectors of sixteen floats can be looked up in a table (`Emitter.looked_up`)."""
    return "+avx512f" in processor()[1].split(",")


@cache
def folder() -> Path:
    """Where compiled code of this version for this processor lies."""
    mark = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        mark.update(source.read_bytes())
    for fact in (llvmlite.__version__, *processor()):
        mark.update(fact.encode())
    return home() / "compiled" / mark.hexdigest()[:16]


def is_compiled(name: str) -> bool:
    """Whether there is whole code by this name on disk."""
    return _read(_path(name)) is not None


def compile_kernels(name: str, kernels: dict[str, Body]) -> Code:
    """Kernels by name, and what writes them."""
    return Code(_loaded(compiled_kernels(name, kernels)), list(kernels))


def compiled_kernels(name: str, kernels: dict[str, Body]) -> bytes:
    """Their object file's contents, from the disk or compiled now and kept there."""
    _start()
    path = _path(name)
    data = _read(path)
    if data is None:
        with _alone(path):
            data = _read(path)
            if data is None:
                log.info("compiling kernels for this processor (%s): %s", processor()[0], name)
                data = _compiled(kernels)
                _write(path, data)
                _tidy(path.parent)
    return data


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Wait for another process that compiles the same, where the file system has locks."""
    lock = path.with_suffix(".lock")
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(lock, os.O_CREAT | os.O_RDWR, 0o600)
    except OSError:
        yield
        return
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        # One that still waits for this file finds the code on disk when it gets the lock.
        lock.unlink(missing_ok=True)
        os.close(descriptor)


def _path(name: str) -> Path:
    return folder() / f"{name}.o"


def _compiled(kernels: dict[str, Body]) -> bytes:
    module = ir.Module()
    for name, body in kernels.items():
        _, *arguments = inspect.signature(body).parameters
        kind = ir.FunctionType(
            ir.VoidType(), [FLOAT if name in FLOAT_ARGUMENTS else LONG for name in arguments]
        )
        function = ir.Function(module, kind, name)
        builder = ir.IRBuilder(function.append_basic_block("entry"))
        body(Emitter(builder), *function.args)
        builder.ret_void()
    machine = _machine()
    parsed = llvm.parse_assembly(str(module))
    parsed.verify()
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    llvm.create_pass_builder(machine, options).getModulePassManager().run(
        parsed, llvm.create_pass_builder(machine, options)
    )
    data: bytes = machine.emit_object(parsed)
    return data


def _machine() -> Any:
    name, features = processor()
    target = llvm.Target.from_default_triple()
    return target.create_target_machine(
        cpu=name, features=features, opt=3, reloc="pic", codemodel="jitdefault", jit=True
    )


def _loaded(data: bytes) -> Any:
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _machine())
    engine.add_object_file(llvm.ObjectFileRef.from_data(data))
    engine.finalize_object()
    return engine


def _read(path: Path) -> bytes | None:
    """What was kept, if it is whole: LLVM ends the process over an object that is not."""
    try:
        kept = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        log.warning("compiled kernels cannot be read: %s", error)
        return None
    mark, data = kept[:_MARK], kept[_MARK:]
    if hashlib.sha256(data).digest() == mark:
        return data
    log.warning("compiled kernels are damaged and compiled anew: %s", path.name)
    return None


def _write(path: Path, data: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            unfinished = Path(file.name)
            try:
                file.write(hashlib.sha256(data).digest() + data)
                file.flush()
                os.replace(unfinished, path)
            except OSError:
                unfinished.unlink()
                raise
    except OSError as error:
        log.warning("compiled kernels cannot be kept: %s", error)


def _tidy(current: Path) -> None:
    """Let go of what older versions compiled; a few may still be in use."""
    try:
        others = [f for f in current.parent.iterdir() if f.is_dir() and f != current]
        others.sort(key=lambda f: f.stat().st_mtime)
        for old in others[:-_VERSIONS]:
            shutil.rmtree(old, ignore_errors=True)
    except OSError:
        log.debug("compiled kernels of older versions stay", exc_info=True)


_VERSIONS = 4
_MARK = hashlib.sha256().digest_size


@cache
def _start() -> None:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
