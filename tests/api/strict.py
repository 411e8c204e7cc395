"""An SDK's types taken at their word: no field that they do not know, none missing that they need.

The SDKs themselves are lenient: they keep what they do not know and leave out what is not there.
"""

from __future__ import annotations

import datetime
import types
import typing
from collections.abc import Collection
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel

Problems = list[str]


def problems(value: Any, type: Any, where: str = "$", beyond: Collection[str] = ()) -> Problems:
    """What is wrong with a value; `beyond` are names of fields that are ours and documented."""
    while hasattr(type, "__value__"):
        type = type.__value__
    origin = get_origin(type)
    if origin is typing.Annotated:
        return problems(value, get_args(type)[0], where, beyond)
    if origin in (typing.Union, types.UnionType):
        tried = [problems(value, t, where, beyond) for t in get_args(type)]
        return min(tried, key=lambda found: (_worst(found), len(found)))
    if origin is Literal:
        return [] if value in get_args(type) else [f"{where} is {value!r}: no {get_args(type)}"]
    if origin in (list, typing.List):  # noqa: UP006
        if not isinstance(value, list):
            return [f"{where} is no list"]
        (inner,) = get_args(type)
        return [p for i, v in enumerate(value) for p in problems(v, inner, f"{where}[{i}]", beyond)]
    if origin in (dict, typing.Dict):  # noqa: UP006
        return [] if isinstance(value, dict) else [f"{where} is no object"]
    if type in (Any, object) or isinstance(type, typing.TypeVar):
        return []
    if isinstance(type, typing.ForwardRef):
        raise NotImplementedError(type)
    if issubclass(type, BaseModel):
        return _model(value, type, where, beyond)
    return [] if _is(value, type) else [f"{where} is {value!r}: no {type.__name__}"]


def _worst(found: Problems) -> int:
    """A wrong tag says that it is another of a union's members."""
    return sum(".type is" in p or ".object is" in p or "is no " in p for p in found)


def _model(value: Any, type: type[BaseModel], where: str, beyond: Collection[str]) -> Problems:
    if not isinstance(value, dict):
        return [f"{where} is no object"]
    fields = {(f.alias or name): f for name, f in type.model_fields.items()}
    found = [f"{where}.{k} is not known to {type.__name__}" for k in value if k not in fields]
    found = [p for p in found if p.split(" ")[0].rpartition(".")[2] not in beyond]
    for name, field in fields.items():
        if name in value:
            found += problems(value[name], field.annotation, f"{where}.{name}", beyond)
        elif field.is_required():
            found.append(f"{where}.{name} of {type.__name__} is missing")
    return found


def _is(value: Any, type: type) -> bool:
    if value is None or type is types.NoneType:
        return value is None and type is types.NoneType
    if type is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if type is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if type is datetime.datetime:
        return datetime.datetime.fromisoformat(value).tzinfo is not None
    return isinstance(value, type)
