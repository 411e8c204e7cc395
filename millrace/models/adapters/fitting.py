"""Whether an adapter fits a model: its modules found among the model's, their shapes compared. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from millrace.errors import AdapterError
from millrace.models.adapters.folder import Adapter, Factors

Shape = tuple[int, int]
"""Inputs and outputs of a module."""
_LAYER = re.compile(r"(?:^|\.)(layers\.\d+\..+)$")
_NAMED = 3


def fitted(adapter: Adapter, shapes: Mapping[str, Shape], name: str) -> Adapter:
    """The adapter by the model's own names of its modules; raises AdapterError where it does not fit."""
    ends: dict[str, list[str]] = {}
    for known in shapes:
        if match := _LAYER.search(known):
            ends.setdefault(match[1], []).append(known)
    found: dict[str, Factors] = {}
    unknown: list[str] = []
    for module, factors in adapter.modules.items():
        place = _place(module, shapes, ends)
        if place is None or place in found:
            unknown.append(module)
            continue
        given = factors.a.shape[0], factors.b.shape[1]
        if given != shapes[place]:
            raise AdapterError(
                f"The adapter '{name}' is for another model: {module} has {given[0]} inputs and {given[1]} "
                f"outputs in it, and {shapes[place][0]} and {shapes[place][1]} in this model."
            )
        found[place] = factors
    if unknown:
        more = f" and {len(unknown) - _NAMED} more" if len(unknown) > _NAMED else ""
        raise AdapterError(
            f"The adapter '{name}' targets what is no linear layer of this model: "
            f"{', '.join(unknown[:_NAMED])}{more}."
        )
    return replace(adapter, modules=found)


def _place(module: str, shapes: Mapping[str, Shape], ends: Mapping[str, list[str]]) -> str | None:
    """The model's name of a module: models inside others have longer ones than alone."""
    if module in shapes:
        return module
    if match := _LAYER.search(module):
        candidates = ends.get(match[1], [])
        return candidates[0] if len(candidates) == 1 else None
    last = module.rsplit(".", 1)[-1]
    heads = [name for name in shapes if "layers." not in name and name.rsplit(".", 1)[-1] == last]
    return heads[0] if len(heads) == 1 else None
