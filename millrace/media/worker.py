"""A worker process: `python -m millrace.media.worker LIMITS`, which looks at strangers' pictures.

A task is a file, a reply what the picture in it is or why there is none. Whatever a hostile file does
to a decoder happens here, within limits that the system keeps.
"""

from __future__ import annotations

import os
import sys

import msgspec

from millrace.errors import BadPicture
from millrace.frames import WorkerEnd
from millrace.media.decode import digest_of, pixels
from millrace.media.limits import MediaLimits

IDLE = 60.0
"""Seconds without a task after which a worker gives its memory back."""
_ROOM = 2 << 30
"""Bytes of address space beside what the largest picture takes."""


class SeenPicture(msgspec.Struct, tag="seen"):
    """A picture that can be decoded."""

    digest: str
    width: int
    height: int


class BrokenPicture(msgspec.Struct, tag="broken"):
    message: str


reply_decoder = msgspec.msgpack.Decoder(SeenPicture | BrokenPicture)


def task_of(data: bytes, low: bool) -> tuple[bytes, bytes]:
    """A file to be looked at, and whether few pixels are enough; in parts, as it may be large."""
    return bytes([low]), data


def reply_to(task: bytes, limits: MediaLimits) -> SeenPicture | BrokenPicture:
    try:
        image = pixels(task[1:], limits, low=bool(task[0]))
        return SeenPicture(digest_of(image), *image.size)
    except BadPicture as error:
        return BrokenPicture(error.message)


def confine(limits: MediaLimits) -> None:
    """Have the system refuse memory beyond what a picture needs, where it can."""
    try:
        import resource
    except ImportError:
        return
    most = _ROOM + 20 * limits.most_pixels
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard == resource.RLIM_INFINITY or hard > most:
        try:
            resource.setrlimit(resource.RLIMIT_AS, (most, hard))
        except (OSError, ValueError):
            pass  # not every system keeps such a limit; those on the picture hold anyway


def main() -> None:
    end = WorkerEnd()
    limits = msgspec.json.decode(sys.argv[1], type=MediaLimits)
    confine(limits)
    for data in end.tasks(IDLE):
        end.reply(msgspec.msgpack.encode(reply_to(data, limits)))
    os._exit(0)


if __name__ == "__main__":
    main()
