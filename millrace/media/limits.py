"""What pictures may cost, and where they may come from."""

from __future__ import annotations

import msgspec


class MediaLimits(msgspec.Struct, frozen=True, kw_only=True):
    remote: bool = True
    """Whether pictures are fetched from http and https addresses."""
    folders: tuple[str, ...] = ()
    """Where pictures may lie that are named by file: addresses; without any, nowhere."""
    most: int = 64
    """Pictures of one request."""
    most_bytes: int = 20 << 20
    """Of one picture as it came."""
    most_fetched: int = 64 << 20
    """Bytes of all pictures that one request has fetched."""
    most_pixels: int = 64_000_000
    """Of one picture, known before it is decoded."""
    longest_side: int = 32_768
    most_frames: int = 64
    """That a video is seen by."""
    longest_film: int = 3_000
    """Frames that an animation may have, of which some are seen."""
    fetch_seconds: float = 15.0
    """For one picture, redirects and the look-up of names included."""
    decode_seconds: float = 20.0
    redirects: int = 3
