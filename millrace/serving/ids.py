"""Names that clients give their requests: what one may look like, and that no two of a caller are alike."""

from __future__ import annotations

import re

from millrace.errors import BadRequest
from millrace.serving.registry import Registry

_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def is_valid(chosen: str) -> bool:
    """Whether an id is fit to be written in a path and in a header."""
    return _ID.fullmatch(chosen) is not None


def checked(registry: Registry, chosen: str, param: str, caller: str) -> str:
    """An id that a client chose: fit to be written in a path, and not in use by the same caller."""
    if not is_valid(chosen):
        raise BadRequest(
            f"{param} must be 1 to 128 letters, digits, '-', '_', '.' or ':'.", param=param
        )
    if any(m.client.knows(chosen, caller) for m in registry.all()):
        raise BadRequest(f"A request with the id '{chosen}' is running.", param=param)
    return chosen
