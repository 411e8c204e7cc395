"""Handing a request to its model, the same way for every protocol and transport.

A request is held to the quotas of its caller and of its model. What it costs is charged to both when it
ends, and where callers are kept apart, each has cached state of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from millrace.errors import BadRequest
from millrace.protocol import EncodingKind
from millrace.serving.encodings import EncodingRun, Encodings
from millrace.serving.group import Group
from millrace.serving.model import ServedModel
from millrace.serving.quotas import UsageQuota
from millrace.serving.request import Request
from millrace.serving.running import Running
from millrace.text.inputs import Inputs


@dataclass(frozen=True)
class Origin:
    """Where a request comes from, as far as a front knows it."""

    endpoint: str
    """The route or method, for the metrics."""
    caller: str = ""
    """The id of the caller's key; empty on a server without keys."""
    quota: UsageQuota | None = None
    """What the caller is held to; None where nothing is limited."""
    isolated: bool = False
    """Whether cached state is shared with nobody else."""


def run(model: ServedModel, request: Request, origin: Origin) -> Running:
    """Must be closed, however it ends."""
    _fit(request, model, origin)
    claim = _Claim(origin.quota, model.quota, prompts=1, answers=request.n)
    with claim:
        return claim.counted(model.run(_marked(request, origin)))


async def run_group(model: ServedModel, requests: list[Request], origin: Origin) -> Group:
    """Must be closed, however it ends."""
    for request in requests:
        _fit(request, model, origin)
    answers = sum(request.n for request in requests)
    claim = _Claim(origin.quota, model.quota, prompts=len(requests), answers=answers)
    with claim:
        members = await model.run_all([_marked(r, origin) for r in requests])
    return Group([claim.counted(m) for m in members])


def run_encoding(
    encodings: Encodings,
    id: str,
    inputs: Inputs,
    origin: Origin,
    kind: EncodingKind = "vectors",
    *,
    normalize: bool | None = None,
    dimensions: int | None = None,
    priority: int = 0,
    timeout: float | None = None,
) -> EncodingRun:
    """Must be closed, however it ends."""
    for quota in (origin.quota, encodings.quota):
        if quota is not None:
            quota.check_prompt(inputs.longest)
    claim = _Claim(origin.quota, encodings.quota, prompts=len(inputs.tokens), answers=1)
    with claim:
        running = encodings.run(
            id,
            inputs,
            kind,
            normalize=normalize,
            dimensions=dimensions,
            priority=priority,
            timeout=timeout,
            endpoint=origin.endpoint,
            caller=origin.caller,
        )
    running.on_end(lambda tokens: claim.ended(1, tokens))
    return running


class _Claim:
    """Prompts and answers counted in the quotas, and given back where their requests do not begin."""

    def __init__(
        self, key: UsageQuota | None, model: UsageQuota | None, *, prompts: int, answers: int
    ) -> None:
        self._key, self._model = key, model
        self._prompts, self._answers = prompts, answers

    def __enter__(self) -> None:
        if self._model is not None and self._model.rates:
            self._model.rates.admit(self._model.owner)
            try:
                self._model.rates.admit_prompts(self._model.owner, self._prompts, "prompt")
            except BadRequest:
                self._model.rates.give_back(self._model.owner, 1)
                raise
        if self._key is not None:
            try:
                self._key.begin(self._answers)
            except BaseException:
                self._give_back()
                raise

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._give_back()
            if self._key is not None:
                self._key.end(self._answers)

    def _give_back(self) -> None:
        if self._model is not None and self._model.rates:
            self._model.rates.give_back(self._model.owner, self._prompts)

    def ended(self, answers: int, tokens: int) -> None:
        if self._key is not None:
            self._key.end(answers)
            self._key.charge(tokens)
        if self._model is not None:
            self._model.charge(tokens)

    def counted(self, running: Running) -> Running:
        n = running.n
        running.on_end(lambda usage: self.ended(n, usage.prompt + usage.completion))
        return running


def _fit(request: Request, model: ServedModel, origin: Origin) -> None:
    """Refuse a prompt or an answer beyond the limits; an answer whose length only a default says is cut."""
    asked, defaults = request.max_tokens, (model.default_limit, request.default_tokens)
    quotas = [quota for quota in (origin.quota, model.quota) if quota is not None]
    for quota in quotas:
        quota.check_prompt(len(request.prompt))
        if asked is not None and asked not in defaults:
            quota.check_answer(asked)
    most = [limit for q in quotas if (limit := q.limits.max_answer_tokens) is not None]
    if most and not request.only_prompt:
        request.max_tokens = min(most if asked is None else [asked, *most])


def _marked(request: Request, origin: Origin) -> Request:
    request.endpoint = origin.endpoint
    request.caller = origin.caller
    if origin.isolated:
        request.cache_salt = f"key:{origin.caller}\0{request.cache_salt}"
    return request
