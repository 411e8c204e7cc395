"""POST /v1/files/text: the text of a PDF, to be put into a message. Nothing is stored."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from millrace.api.answer import as_json
from millrace.api.body import convert, read_object
from millrace.api.context import context_of
from millrace.api.openapi.describe import READS, describe

router = APIRouter()


class FileTextRequest(msgspec.Struct, forbid_unknown_fields=True):
    file_data: str
    """The PDF as base64, with or without `data:application/pdf;base64,` before it."""
    filename: str | None = None
    """Returned as it came."""


class FileTextAnswer(msgspec.Struct):
    text: str
    pages: int
    pages_read: int
    """Fewer than `pages` where the document is longer than this server reads."""
    truncated: bool
    """Whether text is missing at the end."""
    filename: str | None = None
    object: str = "file.text"


@router.post("/v1/files/text")
@describe(
    "server",
    "The text of a PDF",
    body=FileTextRequest,
    answer=FileTextAnswer,
    statuses=(*READS, 429, 503),
)
async def file_text(http: HttpRequest) -> Response:
    context = context_of(http)
    wire = convert(await read_object(http, context.config.max_body), FileTextRequest)
    found = await context.documents.text(wire.file_data)
    answer = FileTextAnswer(
        found.text, found.pages, found.pages_read, found.truncated, wire.filename
    )
    return as_json(answer)
