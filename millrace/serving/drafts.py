"""From what users say of a draft to what an engine is told of it."""

from __future__ import annotations

import msgspec

from millrace.config import EngineConfig, SpecPrefillConfig
from millrace.errors import SetupError
from millrace.models.fetch import Progress, silent
from millrace.models.resolve import resolve


def specprefill_of(
    draft: str | None,
    on: bool | None,
    threshold: int | None,
    keep: float | None,
    where: str = "--",
) -> SpecPrefillConfig | None:
    """What was said; the draft is still to be found."""
    if draft is None:
        if on or threshold is not None or keep is not None:
            raise SetupError(
                f"{where}specprefill needs a draft: add {where}specprefill-draft MODEL."
            )
        return None
    if not draft:
        raise SetupError(f"{where}specprefill-draft is empty; name a folder, a file or a model.")
    found = SpecPrefillConfig(draft=draft, on=bool(on))
    if threshold is not None:
        found = msgspec.structs.replace(found, threshold=threshold)
    return found if keep is None else msgspec.structs.replace(found, keep=keep)


def with_draft(engine: EngineConfig, progress: Progress = silent) -> EngineConfig:
    """The same with its draft found on this machine, or fetched."""
    if engine.specprefill is None:
        return engine
    found = resolve(engine.specprefill.draft, progress=progress)
    settings = msgspec.structs.replace(engine.specprefill, draft=str(found.path))
    return msgspec.structs.replace(engine, specprefill=settings)
