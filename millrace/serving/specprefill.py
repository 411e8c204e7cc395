"""Whether a request's prompt may be cut by SpecPrefill, and how: what the server is set to, what the
request says, and what excludes it. In one place for every protocol.
"""

from __future__ import annotations

from millrace.config import SpecPrefillConfig
from millrace.errors import BadRequest
from millrace.protocol.specprefill import SparsePrefill
from millrace.serving.request import Request


def sparse_of(request: Request, settings: SpecPrefillConfig | None) -> SparsePrefill | None:
    """What the engine is told; None for a prompt that runs whole. Raises what cannot be had."""
    asked, keep = request.specprefill, request.specprefill_keep_pct
    if asked is False:
        return None
    if settings is None:
        if asked or keep is not None:
            name = "specprefill" if asked else "specprefill_keep_pct"
            raise BadRequest(
                f"'{name}' needs a draft, and this model has none: start the server with "
                "--specprefill-draft.",
                param=name,
            )
        return None
    scored = request.prompt_logprobs is not None
    if asked and scored:
        raise BadRequest(
            "'specprefill' leaves tokens of the prompt out, and logprobs of all of them were asked for: "
            "send one of the two.",
            param="specprefill",
        )
    if scored or not (asked or settings.on):
        return None
    return SparsePrefill(
        keep=settings.keep if keep is None else keep,
        head=request.head,
        tail=request.tail,
        least=0 if asked else max(1, settings.threshold),
    )
