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
from pathlib import Path
from typing import Any

log = logging.getLogger("millrace.native")


def native(model: Any, threads: int, folder: Path | None = None) -> Any | None:
    """The model run by our own kernels, its weights packed and gone from it; None where that cannot be.

    What its folder has in compact form (`compact`) is taken in place of the model's own weights.
    """
    try:
        import mlx.core as mx

        from millrace.native.model import NativeModel
        from millrace.native.packing import Unsupported, read_compact
        from millrace.native.plan import check, plan
    except (ImportError, OSError) as error:
        # llvmlite that finds its own library missing or unfit says so with an OSError.
        wanted = getattr(error, "name", None) or error
        log.warning("weights are widened to float32: kernels for them need %s", wanted)
        return None
    try:
        check(model)
    except Unsupported as reason:
        log.info("weights are widened to float32: %s", reason)
        return None
    compact = read_compact(folder) if folder is not None else {}
    packed = plan(model, compact)
    # The arrays that the weights were read into; MLX would keep them for others of their size.
    mx.clear_cache()
    return NativeModel(packed, threads, model.args)
