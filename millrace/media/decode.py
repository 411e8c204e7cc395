"""Files of pictures as pixels: bounded before anything is decoded, turned upright, one frame, no alpha.

Runs in worker processes only, since files are strangers' and Pillow is large. What comes out is the
same for the same picture in any lossless form, and so is its digest.
"""

from __future__ import annotations

import bisect
import hashlib
import io
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from millrace.errors import BadPicture
from millrace.media.limits import MediaLimits

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageFile import ImageFile

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF")
_KNOWN = "PNG, JPEG, WebP, GIF, BMP, TIFF and AVIF are taken"
_VIDEO = "a video that would have to be decoded (send an animation, or frames of it as pictures)"
_DIGEST_BYTES = 32
_FRAME_SECONDS = 0.5
"""A video is seen by two frames a second, as the models that take any were trained to."""
_UNTIMED = 0.1
"""Seconds that a frame is shown whose file does not say."""
_GLANCE = 512
"""The longest side of a picture that is to be looked at with little detail."""


def pixels(data: bytes, limits: MediaLimits, *, low: bool = False) -> Image:
    """The picture, upright, its first frame, in RGB; raises why it cannot be had.

    `low` makes it as small as is enough for a glance.
    """
    from PIL import ImageOps

    with _opened(data, limits) as opened:
        opened.load()
        _refuse_large(opened.size, limits)
        found = _plain(ImageOps.exif_transpose(opened))
        if low:
            found.thumbnail((_GLANCE, _GLANCE))
        return found


def frames(data: bytes, limits: MediaLimits, *, low: bool = False) -> list[Image]:
    """Some frames of an animation, at even distances in time."""
    with _opened(data, limits) as opened:
        count = getattr(opened, "n_frames", 1)
        if count < 2:
            raise BadPicture("The file is a picture that does not move; show it as a picture.")
        if count > limits.longest_film:
            raise BadPicture(
                f"The animation has {count} frames; {limits.longest_film} are the most."
            )
        width, height = opened.size
        most = min(limits.most_frames, limits.most_pixels // (width * height))
        if most < 2:
            raise BadPicture(f"An animation of {width} × {height} pixels is too large.")
        found: dict[int, Image] = {}
        shown = _shown(_times(opened, count), most)
        for at in sorted(set(shown)):
            opened.seek(at)
            found[at] = _plain(opened)
            if low:
                found[at].thumbnail((_GLANCE, _GLANCE))
        return [found[at] for at in shown]


def _times(opened: ImageFile, count: int) -> list[float]:
    """When each frame comes, and when the last one ends."""
    times = [0.0]
    for at in range(count):
        opened.seek(at)
        duration = opened.info.get("duration")
        seconds = duration / 1000 if isinstance(duration, int | float) else 0.0
        times.append(times[-1] + (seconds if 0 < seconds < 3600 else _UNTIMED))
    return times


def _shown(times: Sequence[float], most: int) -> list[int]:
    """Which frames are seen: two a second, an even number, at least two and at most so many."""
    wanted = max(2, min(most // 2 * 2, 2 * round(times[-1] / (2 * _FRAME_SECONDS))))
    step = times[-1] / wanted
    return [max(0, bisect.bisect_right(times, step * n) - 1) for n in range(wanted)]


@contextmanager
def _opened(data: bytes, limits: MediaLimits) -> Iterator[ImageFile]:
    """A file of a known kind and a fair size; whatever goes wrong with it within is a refusal."""
    from PIL import Image, UnidentifiedImageError

    if odd := _other_kind(data):
        raise BadPicture(f"The file is {odd}, which is not taken here; {_KNOWN}.")
    # The limit is ours and is checked by us, for every kind alike.
    Image.MAX_IMAGE_PIXELS = None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(data), formats=FORMATS) as opened:
                _refuse_large(opened.size, limits)
                yield opened
    except BadPicture:
        raise
    except UnidentifiedImageError:
        raise BadPicture(f"The file is no picture of a known kind; {_KNOWN}.") from None
    except MemoryError:
        raise BadPicture("The picture takes more memory than a picture may.") from None
    except Exception as error:  # broken files make decoders raise anything
        raise BadPicture(f"The picture is broken and cannot be decoded ({error}).") from error


def digest_of(*images: Image) -> str:
    """What tells the picture from all others, or the frames of a video: their pixels and size."""
    found = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for image in images:
        found.update(b"%dx%d;" % image.size)
        found.update(image.tobytes())
    return found.hexdigest()


def _refuse_large(size: tuple[int, int], limits: MediaLimits) -> None:
    width, height = size
    if width < 1 or height < 1:
        raise BadPicture("The picture has no pixels.")
    if width * height > limits.most_pixels or max(size) > limits.longest_side:
        raise BadPicture(
            f"The picture is {width} × {height} pixels large; {limits.most_pixels // 10**6} million "
            f"and a side of {limits.longest_side} are the most."
        )


def _plain(image: Image) -> Image:
    from PIL import Image

    if image.mode == "RGB" and "transparency" not in image.info:
        return image.copy()
    if image.mode.startswith("I"):
        # Sixteen bits a pixel, of which the upper eight are kept.
        return image.convert("I").point(lambda value: value * (1 / 256)).convert("L").convert("RGB")
    if image.mode in ("RGBA", "RGBa", "LA", "La", "PA") or "transparency" in image.info:
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")
    return image.convert("RGB")


def _other_kind(data: bytes) -> str | None:
    """What files are that people send for pictures, so that the error can say it."""
    begin = data[:512].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if begin.startswith((b"<svg", b"<?xml")) or b"<svg" in begin:
        return "SVG, a drawing and no picture"
    if begin.startswith((b"<!doctype", b"<html", b"<head", b"<body")):
        return "a web page"
    if begin.startswith(b"%pdf"):
        return "a PDF"
    if data[4:8] == b"ftyp" and not data[8:12].startswith(b"avi"):
        kind = data[8:12]
        return "HEIC" if kind[:3] in (b"hei", b"hev", b"mif", b"msf") else _VIDEO
    if data.startswith(b"\x1a\x45\xdf\xa3"):  # Matroska and WebM
        return _VIDEO
    return None
