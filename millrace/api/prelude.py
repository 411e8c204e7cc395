"""How every route that answers begins: the body read and checked, its model found, and what of it
has no effect noted, to be said in the response's header.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec
from starlette.requests import Request as HttpRequest

from millrace.api.body import check_fields, convert, read_object, refuse, unknown
from millrace.api.callers import viewer_of
from millrace.api.context import context_of
from millrace.api.fields import foreign
from millrace.api.leases import STAYS, kept_for, leased
from millrace.errors import BadRequest, MillraceError
from millrace.serving.batches import PromptCount, check_count
from millrace.serving.capability import Gives
from millrace.serving.ignored import HEADER, in_a_header
from millrace.serving.model import ServedModel
from millrace.serving.registry import UNSAID

T = TypeVar("T", bound=msgspec.Struct)


class Border(Generic[T]):
    """One endpoint's line between what it honours, what it refuses, and what only advises."""

    def __init__(
        self,
        type: type[T],
        refused: Mapping[str, tuple[Any, ...]] | None = None,
        advisory: Collection[str] = (),
        *,
        answers: bool = True,
        encodes: bool = False,
        loads: bool | Callable[[T], bool] = True,
        asks: Callable[[T], bool] = lambda wire: True,
        prompts: Callable[[T], PromptCount] | None = None,
    ) -> None:
        """An endpoint that does not answer takes what is for answers as a label.

        One that encodes answers with numbers, all others with text. One that needs no engine does not
        have the model loaded. `asks` tells whether a request wants an answer at all, `prompts` how many
        prompts it brings where there may be several.
        """
        self._prompts = prompts
        self._gives: Gives | None = "numbers" if encodes else "text" if answers else None
        self._asks = asks
        fields = frozenset(type.__struct_fields__)
        self._type = type
        self._loads = loads
        others = foreign(fields | frozenset(advisory)) if answers else {}
        self._refused = others | dict(refused or {})
        self._known = fields | frozenset(advisory) | frozenset(self._refused)

    async def read(self, http: HttpRequest) -> Asked[T]:
        context = context_of(http)
        raw = flattened(await read_object(http, context.config.max_body))
        wire = convert(raw, self._type)
        refuse(raw, self._refused)
        if self._prompts is not None:
            self._count(http, self._prompts(wire))
        name: str | None = getattr(wire, "model", None)
        loads = self._loads if isinstance(self._loads, bool) else self._loads(wire)
        gives = self._gives if self._asks(wire) else None
        ignored = unknown(raw, self._known)
        ttl = kept_for(wire)
        if ttl != UNSAID and viewer_of(http) is not None:
            # How long a model stays concerns all callers: it is an administrator's to say.
            ttl = UNSAID
            ignored += [field for field in STAYS if getattr(wire, field, None) is not None]
        model = await leased(http, name, loads=loads, ttl=ttl, gives=gives)
        return Asked(wire, raw, model, ignored)

    def _count(self, http: HttpRequest, count: PromptCount) -> None:
        """Refuse too many prompts, and charge the caller's requests, before a model is loaded for them."""
        check_count(count)
        admit: Callable[[int, str], None] | None = http.scope["state"].get("admit_prompts")
        if admit is not None:
            admit(count.prompts, count.param)


@dataclass(frozen=True)
class Asked(Generic[T]):
    """A request that was read."""

    wire: T
    raw: dict[str, Any]
    model: ServedModel
    ignored: list[str]
    """Fields without effect: unknown ones, and those that the caller's key has no right to set."""

    def headers(self, id: str, more: Collection[str] = ()) -> dict[str, str]:
        """What the response says of the request; `more` names what else had no effect."""
        return {"x-request-id": id} | ignored_header([*self.ignored, *more])


def flattened(raw: dict[str, Any]) -> dict[str, Any]:
    """`extra_body` is how SDKs spell further fields; some clients send it as it is."""
    extra = raw.get("extra_body")
    if extra is None:
        return raw
    if not isinstance(extra, dict):
        raise BadRequest("extra_body must be an object of further fields.", param="extra_body")
    check_fields(extra, "extra_body", "extra_body")
    return {k: v for k, v in raw.items() if k != "extra_body"} | extra


def ignored_header(names: Collection[str]) -> dict[str, str]:
    """What was left out of the request, said in the response."""
    return {HEADER: in_a_header(names)} if names else {}


@contextlib.contextmanager
def in_words(names: Mapping[str, str]) -> Iterator[None]:
    """Errors of the core name fields as chat does; here, as `names` has it for this protocol.

    A name stands for all that is inside the field, too.
    """
    try:
        yield
    except MillraceError as error:
        for ours, theirs in names.items():
            if error.param == ours or (error.param or "").startswith(f"{ours}."):
                error.param = theirs
                error.message = error.message.replace(f"'{ours}", f"'{theirs}")
                error.args = (error.message,)
                break
        raise
