"""Text from documents that callers send: read in worker processes, shared fairly between callers.

Separate from pictures (millrace.serving.media), so that a document that takes its whole time delays no
picture.
"""

from __future__ import annotations

import asyncio
import binascii
import functools
from base64 import b64decode

import msgspec

from millrace.errors import BadDocument, DeadlineExceeded
from millrace.fair_executor import FairExecutor
from millrace.media.document import DocumentLimits, DocumentText, is_pdf
from millrace.media.document_worker import BrokenDocument, reply_decoder
from millrace.sizes import format_bytes
from millrace.worker_pool import WorkerDied, WorkerPool

_PROCESSES = 1
"""Processes that read one caller's documents; one more is for other callers."""
_WAITING_PER_CALLER, _WAITING = 16, 64
_BYTES_PER_SECOND = 500e3
"""About what the parser manages; it orders the queue and decides nothing else."""


class DocumentDesk:
    def __init__(self, limits: DocumentLimits | None = None) -> None:
        self.limits = limits or DocumentLimits()
        config = msgspec.json.encode(self.limits).decode()
        self._pool = WorkerPool(
            ["-m", "millrace.media.document_worker", config], most=_PROCESSES, work="document"
        )
        self._threads = FairExecutor(
            _PROCESSES + 1,
            "documents",
            per_caller=_PROCESSES,
            waiting_per_caller=_WAITING_PER_CALLER,
            waiting=_WAITING,
        )

    def close(self) -> None:
        self._pool.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def text(self, given: str) -> DocumentText:
        """The text of a document that is given as base64, with or without `data:...;base64,`."""
        work = functools.partial(self._text, given)
        expected = len(given) * 3 / 4 / _BYTES_PER_SECOND
        return await asyncio.wrap_future(self._threads.submit_expected(expected, work))

    def _text(self, given: str) -> DocumentText:
        data = self._decoded(given)
        patience = self.limits.seconds + self.limits.page_seconds
        try:
            reply: DocumentText | BrokenDocument = reply_decoder.decode(
                self._pool.run([data], patience)
            )
        except DeadlineExceeded:
            raise BadDocument(f"The PDF was not read within {patience:g} seconds.") from None
        except WorkerDied:
            raise BadDocument("The PDF cannot be read: its reader broke down.") from None
        if isinstance(reply, BrokenDocument):
            raise BadDocument(reply.message)
        return reply

    def _decoded(self, given: str) -> bytes:
        if given.startswith("data:"):
            head, comma, given = given.partition(",")
            if not comma or not head.endswith(";base64"):
                raise BadDocument("A data: address must have the form data:TYPE;base64,DATA.")
        most = self.limits.most_bytes
        if len(given) * 3 // 4 > most + 2:
            raise BadDocument(f"The document is larger than {format_bytes(most)}.")
        try:
            data = b64decode(given, validate=True)
        except (binascii.Error, ValueError):
            raise BadDocument("The document is not valid base64.") from None
        if not is_pdf(data):
            raise BadDocument("This is not a PDF. Other texts are read by the client itself.")
        return data
