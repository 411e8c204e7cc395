"""POST /api/pull: a model fetched in a thread of its own, its progress told as lines of JSON."""

from __future__ import annotations

import asyncio
import os
import re
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from millrace.api.answer import EventStream, as_json, whole
from millrace.api.body import convert, read_object
from millrace.api.context import context_of
from millrace.api.ollama.library import OllamaModelName
from millrace.api.ollama.lines import BLANK, NDJSON, error_line, line
from millrace.api.ollama.names import bare
from millrace.api.openapi.describe import READS, describe
from millrace.errors import BadRequest, MillraceError, ModelNotFound, RequestFailed
from millrace.models import short_names
from millrace.models.resolve import DEFAULT, resolve
from millrace.serving.registry import Registry

router = APIRouter()

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
_PAUSE = 0.2
"""Seconds between two lines about the same stage."""


class PullRequest(OllamaModelName):
    stream: bool | None = None
    """True if left out."""
    insecure: bool | None = None


@router.post("/api/pull")
@describe("ollama", "Fetch a model", body=PullRequest, stream=NDJSON, statuses=(404, *READS, 500))
async def pull(http: HttpRequest) -> Response:
    context = context_of(http)
    wire = convert(await read_object(http, context.config.max_body), PullRequest)
    name = await _checked(wire.asked, context.registry)
    idle = context.config.keep_alive
    if wire.stream is not False:
        lines = _lines(name, context.registry, idle)
        return EventStream(lines, _nothing, error_line, media_type=NDJSON)
    await whole(http, _all(_lines(name, context.registry, idle)), _nothing)
    return as_json({"status": "success"})


async def _checked(name: str, registry: Registry) -> str:
    """Names only: a path would let a caller look around on this machine.

    Where only the named models are served, another would not be after it was fetched.
    """
    name = bare(name)
    if not registry.is_open:
        await registry.spec(name)
        return name
    known = name == DEFAULT or short_names.find(name) or await _is_served(name, registry)
    if not known and not _is_name(name):
        raise BadRequest(
            f"'{name}' cannot be pulled: give a short name such as qwen3-4b, the name of a model here, or "
            "a Hugging Face id such as org/name.",
            param="model",
        )
    return name


def _is_name(text: str) -> bool:
    return _NAME.fullmatch(text) is not None and not os.path.exists(text)


def _nothing() -> None:
    """Whoever stops listening does not stop the fetching: the next pull finds what is there."""


async def _all(lines: AsyncIterator[bytes]) -> None:
    async for _ in lines:
        pass


async def _lines(name: str, registry: Registry, idle: float) -> AsyncIterator[bytes]:
    yield line({"status": "pulling manifest"})
    if not await _is_served(name, registry):
        queue: asyncio.Queue[dict[str, Any] | MillraceError | None] = asyncio.Queue()
        _fetch(name, asyncio.get_running_loop(), queue.put_nowait)
        while True:
            try:
                async with asyncio.timeout(idle):
                    reported = await queue.get()
            except TimeoutError:
                yield BLANK
                continue
            if reported is None:
                break
            if isinstance(reported, MillraceError):
                raise reported
            yield line(reported)
    yield line({"status": "success"})


async def _is_served(name: str, registry: Registry) -> bool:
    try:
        await registry.spec(name, bare(name))
    except ModelNotFound:
        return False
    return True


def _fetch(
    name: str,
    loop: asyncio.AbstractEventLoop,
    put: Callable[[dict[str, Any] | MillraceError | None], None],
) -> None:
    """In a thread that does not keep the server from ending."""
    reported: dict[str, float] = {}

    def tell(item: dict[str, Any] | MillraceError | None) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(put, item)

    def progress(stage: str, done: int, total: int | None) -> None:
        now = time.monotonic()
        if done == total or now - reported.get(stage, 0.0) >= _PAUSE:
            reported[stage] = now
            tell({"status": stage} | ({"total": total, "completed": done} if total else {}))

    def work() -> None:
        try:
            found = resolve(name, progress=progress)
            if found.note:
                tell({"status": found.note})
            tell(None)
        except MillraceError as error:
            tell(error)
        except Exception as error:
            tell(RequestFailed(f"The model '{name}' could not be fetched: {error}"))

    threading.Thread(target=work, name=f"pull-{name}", daemon=True).start()
