"""What every route needs to know: the models, the configuration, and a fresh id."""

from __future__ import annotations

import functools
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field

from starlette.requests import Request

from millrace.api.admin.feed import Feed
from millrace.api.admin.log_lines import LogLines
from millrace.api.body_budget import BodyBudget, budget_for
from millrace.api.responses.jobs import Jobs
from millrace.api.responses.store import Store
from millrace.config import ServeConfig
from millrace.serving import ids
from millrace.serving.documents import DocumentDesk
from millrace.serving.hub import HubSearch
from millrace.serving.keys import Caller, Keys
from millrace.serving.metrics import Metrics
from millrace.serving.quotas import Quotas, key_quotas
from millrace.serving.registry import Registry
from millrace.serving.warm_prompts import WarmUpLine


@dataclass(frozen=True)
class Context:
    registry: Registry
    config: ServeConfig
    metrics: Metrics
    store: Store = field(default_factory=Store)
    """Responses and conversations that are kept."""
    jobs: Jobs = field(default_factory=Jobs)
    """Responses that are made in the background."""
    quotas: Quotas = field(default_factory=lambda: key_quotas((), None, None))
    """How much each caller may use, whichever way it asks."""
    documents: DocumentDesk = field(default_factory=DocumentDesk)
    """Reads the text of documents."""
    hub: HubSearch = field(default_factory=HubSearch)
    """Searches the Hugging Face hub."""
    warm: Sequence[WarmUpLine] = ()
    """Prompts that are run at the start."""

    @functools.cached_property
    def keys(self) -> Keys:
        """The API keys; empty on a server that lets everybody in."""
        return Keys(self.config.api_keys)

    @functools.cached_property
    def bodies(self) -> BodyBudget:
        """The memory for request bodies that are being read."""
        return budget_for(self.config.max_body)

    @functools.cached_property
    def feed(self) -> Feed:
        """The status for those who look on."""
        return Feed(self.registry, self.metrics)

    @functools.cached_property
    def log_lines(self) -> LogLines:
        return LogLines()


def context_of(request: Request) -> Context:
    context: Context = request.app.state.context
    return context


def request_id(request: Request, prefix: str) -> str:
    """The id that the client chose in `x-request-id`, else a fresh one."""
    chosen = request.headers.get("x-request-id")
    if chosen is None:
        return f"{prefix}{secrets.token_hex(12)}"
    return checked_id(request, chosen, "x-request-id")


def checked_id(request: Request, chosen: str, param: str) -> str:
    """An id that a client chose: fit to be written in a path, and not in use by its caller."""
    return ids.checked(context_of(request).registry, chosen, param, caller_of(request))


def caller_of(http: Request) -> str:
    """The id of the key that a request came with; empty on a server without keys."""
    caller = known_caller(http)
    return caller.id if caller is not None else ""


def known_caller(http: Request) -> Caller | None:
    """The holder of the key that a request came with; None on a server without keys."""
    caller = http.scope.get("state", {}).get("caller")
    return caller if isinstance(caller, Caller) else None
