"""Chat templates of one model rendered in a process of their own, which is killed at a deadline.

`python -m millrace.text.template_process` is the process; TemplateProcess is its client. A template
that does not end, or asks for more memory than there is, costs the request that ran it and no other.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import msgspec

from millrace import errors
from millrace.errors import BadRequest, DeadlineExceeded, MillraceError, ModelError, TemplateTimeout
from millrace.frames import WorkerEnd
from millrace.text.template_renderer import LEAST_OUTPUT, OUTPUT_PER_INPUT, LocalRenderer, short
from millrace.worker_pool import TaskSize, WorkerDied, WorkerPool

try:
    import resource
except ImportError:  # not every Python has it; then the deadline alone holds
    resource = None  # type: ignore[assignment]

log = logging.getLogger("millrace.text")

DEADLINE = 10.0
"""Seconds that one rendering may take. Templates take milliseconds for texts of this size."""
_IDLE = 600.0
"""Seconds without a task after which the process ends."""
_MEMORY = 1 << 30
"""Bytes of address space that templates may take, where the system keeps such a limit."""


class TemplateTask(msgspec.Struct):
    kind: str
    """`render`, `variables` or `needs_tools`."""
    source: str
    values: dict[str, Any] = {}
    most: int = 0
    """Characters that may be written."""


class TemplateReply(msgspec.Struct, omit_defaults=True):
    text: str = ""
    names: list[str] = []
    yes: bool = False
    error: str = ""
    """The class of an error of ours, which `text` explains."""


_encoder = msgspec.json.Encoder()
_task_decoder = msgspec.json.Decoder(TemplateTask)
_reply_decoder = msgspec.json.Decoder(TemplateReply)


class TemplateProcess:
    """A TemplateRenderer that starts its process when it is first used."""

    def __init__(self, model: str) -> None:
        """`model` names the model in errors and logs."""
        self._model = model
        self._pool = WorkerPool(
            ["-m", "millrace.text.template_process"],
            most=1,
            work="chat template",
            nicer=0,
            waiting_per_caller=64,
            waiting=256,
        )
        self._local = LocalRenderer()
        self._counting = threading.Lock()
        self.timeouts = 0

    def open(self) -> None:
        """Start the process, so that the first request need not wait for it."""
        self._pool.open()

    def variables(self, source: str) -> frozenset[str]:
        return frozenset(self._ask(TemplateTask("variables", source)).names)

    def needs_tools(self, source: str, values: Mapping[str, Any]) -> bool:
        return self._ask(TemplateTask("needs_tools", source, dict(values))).yes

    def render(self, source: str, values: Mapping[str, Any]) -> str:
        try:
            return self._ask(TemplateTask("render", source, dict(values))).text
        except _NotJson:
            # Only programs that call in this process have values that are no JSON.
            return self._local.render(source, values)

    def close(self) -> None:
        self._pool.close()

    def count_timeout(self) -> None:
        """Note and log that the template was cut off."""
        with self._counting:
            self.timeouts += 1
        log.warning(
            "%s: the chat template did not finish within %g s and was stopped (%d times so far)",
            self._model,
            DEADLINE,
            self.timeouts,
        )

    def _ask(self, task: TemplateTask) -> TemplateReply:
        try:
            size = len(_encoder.encode(task.values))
            task.most = LEAST_OUTPUT + OUTPUT_PER_INPUT * size
            data = _encoder.encode(task)
        except RecursionError:
            raise BadRequest("The messages are nested too deeply.", param="messages") from None
        except UnicodeEncodeError:
            where = "model's chat template" if _is_no_text(task.source) else "messages"
            raise BadRequest(
                f"The {where} cannot be written as UTF-8: half of a surrogate pair stands alone.",
                param="messages",
            ) from None
        except (TypeError, ValueError) as error:
            raise _NotJson from error
        try:
            reply = _reply_decoder.decode(
                self._pool.run([data], DEADLINE, TaskSize("template", size))
            )
        except DeadlineExceeded:
            self.count_timeout()
            raise TemplateTimeout(DEADLINE, self._model) from None
        except WorkerDied:
            raise BadRequest(
                f"The chat template of the model '{self._model}' ended the process that ran it.",
                param="messages",
            ) from None
        if reply.error:
            kind = cast(type[MillraceError], getattr(errors, reply.error, ModelError))
            raise kind(reply.text, param="messages")
        return reply


class DeadlineRenderer(LocalRenderer):
    """Renders in the main thread of a process that has other work too, within the limits of a process that
    has not: an alarm ends what is too long, and memory is limited as long as a template runs.

    An alarm interrupts Python code only: the caller of the process has a deadline of its own.
    """

    def variables(self, source: str) -> frozenset[str]:
        with _limits():
            return super().variables(source)

    def needs_tools(self, source: str, values: Mapping[str, Any]) -> bool:
        with _limits():
            return super().needs_tools(source, values)

    def render(self, source: str, values: Mapping[str, Any], most: int | None = None) -> str:
        most = most or LEAST_OUTPUT + OUTPUT_PER_INPUT * len(_encoder.encode(values))
        with _limits():
            return super().render(source, values, most)


@contextlib.contextmanager
def _limits() -> Iterator[None]:
    """What one rendering may take; for the main thread."""

    def expire(*_: object) -> None:
        raise TemplateTimeout(DEADLINE)

    with _memory_limit(_MEMORY):
        before = signal.signal(signal.SIGALRM, expire)
        signal.setitimer(signal.ITIMER_REAL, DEADLINE)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)


def _address_space() -> int | None:
    """Bytes of address space that this process has, where the system reports it in a file."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        return pages * os.sysconf("SC_PAGESIZE")
    except (OSError, ValueError, AttributeError):
        return None


@contextlib.contextmanager
def _memory_limit(more: int) -> Iterator[None]:
    """Limits the address space of this process to this many bytes more than it has, where the system keeps
    such a limit."""
    has = _address_space()
    if resource is None or has is None:
        yield
        return
    before = _set_memory_limit(has + more)
    try:
        yield
    finally:
        if before is not None:
            with contextlib.suppress(OSError, ValueError):
                resource.setrlimit(resource.RLIMIT_AS, before)


def _set_memory_limit(size: int) -> tuple[int, int] | None:
    """The limits before, if they were higher and were changed."""
    if resource is None:
        return None
    try:
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        if all(limit == resource.RLIM_INFINITY or limit > size for limit in (soft, hard)):
            resource.setrlimit(resource.RLIMIT_AS, (size, hard))
            return soft, hard
    except (OSError, ValueError):
        pass  # not every system keeps such a limit; the deadline holds anyway
    return None


class _NotJson(Exception):
    """The values cannot be sent to another process."""


def _is_no_text(source: str) -> bool:
    """Whether it cannot be encoded."""
    try:
        source.encode()
    except UnicodeEncodeError:
        return True
    return False


def reply_to(task: TemplateTask, renderer: LocalRenderer) -> TemplateReply:
    try:
        match task.kind:
            case "variables":
                return TemplateReply(names=sorted(renderer.variables(task.source)))
            case "needs_tools":
                return TemplateReply(yes=renderer.needs_tools(task.source, task.values))
            case _:
                return TemplateReply(text=renderer.render(task.source, task.values, task.most))
    except BadRequest as error:
        return TemplateReply(text=error.message, error="BadRequest")
    except ModelError as error:
        return TemplateReply(text=error.message, error="ModelError")
    except Exception as error:  # a template raises what it likes
        reason = f"The model's chat template cannot render these messages: {short(error)}"
        return TemplateReply(text=reason, error="BadRequest")


def main() -> None:
    end = WorkerEnd(nicer=0)
    _set_memory_limit(_MEMORY)
    renderer = LocalRenderer()
    for data in end.tasks(_IDLE):
        reply = reply_to(_task_decoder.decode(data), renderer)
        try:
            sent = _encoder.encode(reply)
        except (UnicodeEncodeError, ValueError) as error:  # an error's text may be anything
            sent = _encoder.encode(TemplateReply(text=str(error), error="BadRequest"))
        end.reply(sent)
    os._exit(0)


if __name__ == "__main__":
    main()
