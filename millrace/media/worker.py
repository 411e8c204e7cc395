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
from millrace.media.decode import digest_of, frames, pixels
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


def task_of(data: bytes, low: bool, moving: bool) -> tuple[bytes, bytes]:
    """A file to be looked at, whether few pixels are enough, and whether it is a video; in parts, as it
    may be large."""
    return bytes([low | moving << 1]), data


def reply_to(task: bytes, limits: MediaLimits) -> SeenPicture | BrokenPicture:
    try:
        low, moving = bool(task[0] & 1), bool(task[0] & 2)
        images = (
            frames(task[1:], limits, low=low) if moving else [pixels(task[1:], limits, low=low)]
        )
        return SeenPicture(digest_of(*images), *images[0].size)
    except BadPicture as error:
        return BrokenPicture(error.message)


def confine(most: int) -> None:
    """Have the system refuse address space beyond `most` bytes, where it can."""
    try:
        import resource
    except ImportError:
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard == resource.RLIM_INFINITY or hard > most:
        try:
            resource.setrlimit(resource.RLIMIT_AS, (most, hard))
        except (OSError, ValueError):
            pass  # not every system keeps such a limit; those on the file hold anyway


def main() -> None:
    end = WorkerEnd()
    limits = msgspec.json.decode(sys.argv[1], type=MediaLimits)
    confine(_ROOM + 20 * limits.most_pixels)
    for data in end.tasks(IDLE):
        end.reply(msgspec.msgpack.encode(reply_to(data, limits)))
    os._exit(0)


if __name__ == "__main__":
    main()
