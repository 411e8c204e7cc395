"""Forward passes of our own on a CPU: packed weights, all cores, one pass one call.

MLX's CPU back-end has no fast product for quantised weights and runs what is no product on one core. Here
a model that is known (`plan`) becomes a list of stages (`program`) of compiled kernels (`library`), which
the threads of a `pool` carry out together. Nothing here knows of requests or batches: a `NativeModel` is
called as mlx-lm's models are, on the same caches.

Code is compiled by llvmlite while a model is loaded (`ahead`) and kept under MILLRACE_HOME. Where llvmlite
is missing or a model is not known, MLX runs it.
"""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from millrace.config import home

log = logging.getLogger("millrace.native")

LOADING, COMPILING = "loading the model", "compiling kernels for this processor"


class LoadingNote(Protocol):
    """Hears how far a stage of loading is, from 0 to 1."""

    def __call__(self, share: float, stage: str = LOADING) -> None: ...


def unheard(share: float, stage: str = LOADING) -> None:
    """For loading that nobody watches."""


def native(
    model: Any,
    threads: int,
    folder: Path | None = None,
    note: LoadingNote = unheard,
) -> Any | None:
    """The model run by our own kernels, its weights packed and gone from it; None where that cannot be.

    What its folder has in compact form (`compact`) is taken in place of the model's own weights. All
    kernels that the model may ever need are compiled when this returns.
    """
    if (problem := missing()) is not None:
        log.warning("weights are widened to float32: kernels for them need %s", problem)
        return None
    import mlx.core as mx

    from millrace.native.ahead import KernelCompiler
    from millrace.native.model import NativeModel
    from millrace.native.packing import UnsupportedByKernels, read_compact
    from millrace.native.plan import check, plan

    try:
        check(model)
    except UnsupportedByKernels as reason:
        log.info("the model is not run as a whole by our own kernels: %s", reason)
        return None
    kernels = KernelCompiler(threads)
    compact = read_compact(folder) if folder is not None else {}
    packed = plan(model, compact, note, kernels.want)
    kernels.finish(partial(note, stage=COMPILING))
    # The arrays that the weights were read into; MLX would keep them for others of their size.
    mx.clear_cache()
    return NativeModel(packed, threads, model.args)


def native_layers(
    model: Any, threads: int, folder: Path | None = None, note: LoadingNote = unheard
) -> Any | None:
    """Put our own layers in the place of a model's quantised ones.

    Returns what they share, of which `logits` says whether the model's head is wanted; None where nothing
    was replaced.
    """
    if missing() is not None:
        return None
    import mlx.core as mx

    from millrace.native.ahead import KernelCompiler
    from millrace.native.linear import replace_layers
    from millrace.native.packing import Packer, read_compact

    kernels = KernelCompiler(threads)
    packer = Packer(model, read_compact(folder) if folder is not None else {}, kernels.want)
    finish = partial(kernels.finish, partial(note, stage=COMPILING))
    products = replace_layers(model, packer, threads, finish)
    mx.clear_cache()
    return products


def missing() -> str | None:
    """What these kernels need and have not."""
    try:
        import llvmlite.binding  # noqa: F401
    except (ImportError, OSError) as error:
        # llvmlite that finds its own library missing or unfit says so with an OSError.
        return str(getattr(error, "name", None) or error)
    return None


def begin_early() -> None:
    """Start compiling what every model needs, while the engine is still starting."""
    if missing() is None:
        from millrace.native import ahead

        ahead.begin_early()


def begin_in_fresh_home() -> None:
    """Have the default model's kernels compiled by a process, while the model is fetched.

    Only where nothing has been compiled yet: to find out what is missing would hold up every start.
    """
    if (home() / "compiled").exists() or find_spec("llvmlite") is None or not sys.executable:
        return
    log.info("%s", COMPILING)
    # It ends by itself; an engine that needs a set before that waits for it.
    with contextlib.suppress(OSError):
        subprocess.Popen(
            [sys.executable, "-m", "millrace.native.ahead", "default"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
