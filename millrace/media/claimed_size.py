"""The number of pixels that a picture file claims to have, read from its first bytes.

For the order of a queue only: a few bytes of PNG, JPEG, GIF and WebP headers are looked at and nothing is
decoded. A file that lies about its size is found out by the decoder (millrace.media.worker).
"""

from __future__ import annotations

import struct

_SOF = frozenset({*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC})
"""JPEG markers whose segment holds the size."""
_SEGMENTS = 256
"""JPEG segments that are looked at before the size is taken to be unknown."""


def claimed_pixels(data: bytes) -> int | None:
    """Width times height; None where the header is not understood."""
    head = data[:32]
    try:
        if head.startswith(b"\x89PNG\r\n\x1a\n"):
            width, height = struct.unpack_from(">II", head, 16)
        elif head[:4] == b"GIF8":
            width, height = struct.unpack_from("<HH", head, 6)
        elif head[:4] == b"RIFF" and head[8:12] == b"WEBP":
            width, height = _webp(head)
        elif head[:2] == b"\xff\xd8":
            return _jpeg(data)
        else:
            return None
    except struct.error:
        return None
    return int(width * height)


def _webp(head: bytes) -> tuple[int, int]:
    match head[12:16]:
        case b"VP8X":
            return 1 + int.from_bytes(head[24:27], "little"), 1 + int.from_bytes(
                head[27:30], "little"
            )
        case b"VP8L":
            bits = int.from_bytes(head[21:25], "little")
            return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
        case _:
            width, height = struct.unpack_from("<HH", head, 26)
            return width & 0x3FFF, height & 0x3FFF


def _jpeg(data: bytes) -> int | None:
    at = 2
    for _ in range(_SEGMENTS):
        if at + 9 > len(data) or data[at] != 0xFF:
            return None
        if data[at + 1] in _SOF:
            height, width = struct.unpack_from(">HH", data, at + 5)
            return int(width * height)
        (length,) = struct.unpack_from(">H", data, at + 2)
        at += 2 + length
    return None
