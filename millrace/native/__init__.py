"""Forward passes of our own on a CPU: packed weights, all cores, one pass one call.

MLX's CPU back-end has no fast product for quantised weights and runs what is no product on one core. Here
a model that is known (`plan`) becomes a list of stages (`program`) of compiled kernels (`library`), which
the threads of a `pool` carry out together. Nothing here knows of requests or batches: a `NativeModel` is
called as mlx-lm's models are, on the same caches.

Code is compiled by llvmlite when it is first used and kept under MILLRACE_HOME. Where llvmlite is missing
or a model is not known, MLX runs it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

log = logging.getLogger("millrace.native")


def native(
    model: Any,
    threads: int,
    folder: Path | None = None,
    note: Callable[[float], None] = lambda share: None,
) -> Any | None:
    """The model run by our own kernels, its weights packed and gone from it; None where that cannot be.

    What its folder has in compact form (`compact`) is taken in place of the model's own weights.
    """
    if (problem := missing()) is not None:
        log.warning("weights are widened to float32: kernels for them need %s", problem)
        return None
    import mlx.core as mx

    from millrace.native.model import NativeModel
    from millrace.native.packing import UnsupportedByKernels, read_compact
    from millrace.native.plan import check, plan

    try:
        check(model)
    except UnsupportedByKernels as reason:
        log.info("the model is not run as a whole by our own kernels: %s", reason)
        return None
    compact = read_compact(folder) if folder is not None else {}
    packed = plan(model, compact, note)
    # The arrays that the weights were read into; MLX would keep them for others of their size.
    mx.clear_cache()
    return NativeModel(packed, threads, model.args)


def native_layers(model: Any, threads: int, folder: Path | None = None) -> Any | None:
    """Put our own layers in the place of a model's quantised ones.

    Returns what they share, of which `logits` says whether the model's head is wanted; None where nothing
    was replaced.
    """
    if missing() is not None:
        return None
    import mlx.core as mx

    from millrace.native.linear import replace_layers
    from millrace.native.packing import Packer, read_compact

    packer = Packer(model, read_compact(folder) if folder is not None else {})
    products = replace_layers(model, packer, threads)
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


def compiled() -> bool:
    """Whether there is code for this processor already, or none will be needed."""
    if missing() is not None:
        return True
    from millrace.native.compile import folder

    return folder().is_dir()
