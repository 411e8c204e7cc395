"""A worker process: `python -m millrace.media.document_worker LIMITS`, which reads the text of PDFs.

A task is a file, a reply its text or why there is none. What a hostile file does to the parser happens
here, within a limit on memory that the system keeps and a limit on time that the front keeps.
"""

from __future__ import annotations

import os
import sys

import msgspec

from millrace.errors import BadDocument
from millrace.frames import WorkerEnd
from millrace.media.document import DocumentLimits, DocumentText, text_of
from millrace.media.worker import confine

IDLE = 60.0
"""Seconds without a task after which a worker gives its memory back."""


class BrokenDocument(msgspec.Struct, tag="broken"):
    message: str


reply_decoder = msgspec.msgpack.Decoder(DocumentText | BrokenDocument)


def reply_to(data: bytes, limits: DocumentLimits) -> DocumentText | BrokenDocument:
    try:
        return text_of(data, limits)
    except BadDocument as error:
        return BrokenDocument(error.message)


def main() -> None:
    end = WorkerEnd()
    limits = msgspec.json.decode(sys.argv[1], type=DocumentLimits)
    confine(limits.memory)
    for data in end.tasks(IDLE):
        try:
            reply = reply_to(data, limits)
        except MemoryError:
            end.reply(msgspec.msgpack.encode(BrokenDocument("The PDF takes too much memory.")))
            os._exit(1)  # what is left of the heap may be in pieces
        end.reply(msgspec.msgpack.encode(reply))
    os._exit(0)


if __name__ == "__main__":
    main()
