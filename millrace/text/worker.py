"""A worker process: `python -m millrace.text.worker CONFIG`, which does one model's text work.

Tasks come in through standard input and results go out through standard output, as frames of JSON.
When standard input closes, the front is gone, and the worker ends with it.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback

import msgspec

from millrace.errors import MillraceError
from millrace.frames import WorkerEnd
from millrace.text.inputs import Inputs
from millrace.text.tasks import PromptLength, Result, Task, TextSide, TextSideConfig, WrittenPrompt
from millrace.text.template_process import DeadlineRenderer

IDLE = 300.0
"""Seconds without a task after which a worker gives its memory back."""


class TaskDone(msgspec.Struct, tag="done"):
    """Exactly one of these is set."""

    prompt: WrittenPrompt | None = None
    count: PromptLength | None = None
    tokens: list[list[int]] | None = None
    text: str | None = None
    inputs: Inputs | None = None


class TaskRefused(msgspec.Struct, tag="refused"):
    """The request's fault, or one of the model: an error of ours, as its class and its fields."""

    kind: str
    fields: dict[str, str | int | bool | None]


class Broken(msgspec.Struct, tag="broken"):
    """A fault of the server's own."""

    trace: str


Reply = TaskDone | TaskRefused | Broken
task_decoder = msgspec.json.Decoder(Task)
reply_decoder = msgspec.json.Decoder(Reply)


def done(result: Result) -> TaskDone:
    match result:
        case WrittenPrompt():
            return TaskDone(prompt=result)
        case PromptLength():
            return TaskDone(count=result)
        case str():
            return TaskDone(text=result)
        case Inputs():
            return TaskDone(inputs=result)
        case list():
            return TaskDone(tokens=result)


def reply_to(data: bytes, side: TextSide) -> Reply:
    try:
        return done(task_decoder.decode(data).run(side))
    except MillraceError as error:
        plain = (str, int, bool, type(None))
        fields = {k: v for k, v in vars(error).items() if isinstance(v, plain)}
        return TaskRefused(type(error).__name__, fields)
    except Exception:  # the front says so to the one who asked, and the next task is another's
        return Broken(traceback.format_exc())


def main() -> None:
    end = WorkerEnd()
    logging.disable(logging.INFO)
    side = TextSide(msgspec.json.decode(sys.argv[1], type=TextSideConfig), DeadlineRenderer())
    for data in end.tasks(IDLE):
        end.reply(msgspec.json.encode(reply_to(data, side)))
        if side.dialect.trial.overran:
            break  # a compilation that was given up would go on and on in here
    os._exit(0)


if __name__ == "__main__":
    main()
