"""The stages that there are, in sets: those of each format, and those that all formats share.

A set is compiled when it is first loaded. `ahead` does that for all of a model's while the model is loaded.
"""

from __future__ import annotations

from functools import cache, partial

from millrace.native import attention, lowrank, stages
from millrace.native.compile import (
    Body,
    Code,
    compile_kernels,
    compiled_kernels,
    multiplies_by_lanes,
    processor,
)
from millrace.native.formats import Format

_SHARED = "shared"


@cache
def tile_shape() -> tuple[int, int]:
    """Rows and blocks of a tile whose sums fit the processor's registers."""
    if multiplies_by_lanes():
        return 5, 1  # the inputs of every row stay in registers as well
    return (12, 2) if "+avx512f" in processor()[1].split(",") else (6, 1)


@cache
def streamed_rows() -> tuple[int, ...]:
    """Rows for which weights are streamed; other numbers up to the most of them are padded to these."""
    # NEON's registers do not hold the sums of eight.
    return (1, 2, 4) if multiplies_by_lanes() else (1, 2, 4, 8)


def streamed_blocks(rows: int) -> int:
    """How many blocks run side by side: sums that need not wait for one another, and fit registers."""
    widest = 2 * tile_shape()[1]
    return widest if rows <= 2 else widest // 2


def padded_rows(rows: int) -> int:
    """Rows that run where so many are wanted."""
    for count in streamed_rows():
        if rows <= count:
            return count
    tile = tile_shape()[0]
    return -(-rows // tile) * tile


@cache
def of_format(form: Format) -> Code:
    """A format's stages: streamed1, streamed2 …, tiled and embedded."""
    return compile_kernels(form.name, _kernels_of(form))


@cache
def shared() -> Code:
    """The stages that know no format, and what drives them all."""
    return compile_kernels(_SHARED, _shared_kernels())


def name_of(form: Format | None) -> str:
    """What a set of kernels is called on disk; None stands for those that all formats share."""
    return form.name if form else _SHARED


def load(form: Format | None) -> Code:
    """A set of kernels in memory, compiled now if it was not."""
    return of_format(form) if form else shared()


def build(form: Format | None) -> None:
    """Have a set of kernels on disk."""
    compiled_kernels(name_of(form), _kernels_of(form) if form else _shared_kernels())


def _kernels_of(form: Format) -> dict[str, Body]:
    kernels: dict[str, Body] = {
        f"streamed{count}": partial(stages.streamed, form, count, streamed_blocks(count))
        for count in streamed_rows()
    }
    kernels["tiled"] = partial(stages.tiled, form, *tile_shape())
    kernels["embedded"] = partial(stages.embedded, form)
    return kernels


def _shared_kernels() -> dict[str, Body]:
    rows, blocks = tile_shape()
    kernels: dict[str, Body] = {
        "attended": partial(attention.attended, rows, blocks),
        "attended4": partial(attention.attended, 4, blocks),
        "driver": stages.driver,
        "fence": stages.fence,
    }
    for body in (
        stages.norm,
        stages.added,
        stages.copied,
        stages.silu,
        stages.gelu,
        stages.headed,
        attention.merged,
        lowrank.lowered,
        lowrank.raised,
    ):
        kernels[body.__name__] = body
    return kernels
