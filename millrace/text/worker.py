"""A worker process: `python -m millrace.text.worker CONFIG`, which does one model's text work.

Tasks come in through standard input and results go out through standard output, each as JSON behind
its length. When standard input closes, the front is gone, and the worker ends with it.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import struct
import sys
import traceback
from typing import BinaryIO, Protocol

import msgspec

from millrace.errors import MillraceError
from millrace.text.inputs import Inputs
from millrace.text.tasks import PromptLength, Result, Task, TextSide, TextSideConfig, WrittenPrompt

IDLE = 300.0
"""Seconds without a task after which a worker gives its memory back."""
_NICENESS = 10
"""Whoever sends a book can wait: running streams come first."""
_LENGTH = struct.Struct("<Q")


class Done(msgspec.Struct, tag="done"):
    """Exactly one of these is set."""

    prompt: WrittenPrompt | None = None
    count: PromptLength | None = None
    tokens: list[list[int]] | None = None
    text: str | None = None
    inputs: Inputs | None = None


class Refused(msgspec.Struct, tag="refused"):
    """The request's fault, or one of the model: an error of ours, as its class and its fields."""

    kind: str
    fields: dict[str, str | int | bool | None]


class Broken(msgspec.Struct, tag="broken"):
    """A fault of the server's own."""

    trace: str


Reply = Done | Refused | Broken
task_decoder = msgspec.json.Decoder(Task)
reply_decoder = msgspec.json.Decoder(Reply)


class Writes(Protocol):
    def write(self, data: bytes, /) -> object: ...

    def flush(self) -> object: ...


class Reads(Protocol):
    def read(self, count: int, /) -> bytes: ...


def write_frame(file: Writes, data: bytes) -> None:
    file.write(_LENGTH.pack(len(data)))
    file.write(data)
    file.flush()


def read_frame(file: Reads) -> bytes | None:
    """The next frame; None once the other side is gone."""
    head = file.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    data = file.read(length)
    return data if len(data) == length else None


def done(result: Result) -> Done:
    match result:
        case WrittenPrompt():
            return Done(prompt=result)
        case PromptLength():
            return Done(count=result)
        case str():
            return Done(text=result)
        case Inputs():
            return Done(inputs=result)
        case list():
            return Done(tokens=result)


def reply_to(data: bytes, side: TextSide) -> Reply:
    try:
        return done(task_decoder.decode(data).run(side))
    except MillraceError as error:
        plain = (str, int, bool, type(None))
        fields = {k: v for k, v in vars(error).items() if isinstance(v, plain)}
        return Refused(type(error).__name__, fields)
    except Exception:  # the front says so to the one who asked, and the next task is another's
        return Broken(traceback.format_exc())


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(_NICENESS)
    # Whatever prints must not end up between the frames.
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    logging.disable(logging.INFO)
    side = TextSide(msgspec.json.decode(sys.argv[1], type=TextSideConfig))
    tasks = os.fdopen(0, "rb", buffering=0)
    while select.select([tasks], [], [], IDLE)[0]:
        data = read_frame(_Whole(tasks))
        if data is None:
            break
        write_frame(out, msgspec.json.encode(reply_to(data, side)))
        if side.dialect.trial.overran:
            break  # a compilation that was given up would go on and on in here
    os._exit(0)


class _Whole:
    """Reads as much as is asked for; not buffered, so that `select` sees all that is waiting."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def read(self, count: int) -> bytes:
        parts: list[bytes] = []
        while count:
            part = self._file.read(min(count, 1 << 20))
            if not part:
                break
            parts.append(part)
            count -= len(part)
        return b"".join(parts)


if __name__ == "__main__":
    main()
