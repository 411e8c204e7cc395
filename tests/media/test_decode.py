"""Files as pixels: one picture is one digest in every lossless form; the rest is refused in words."""

from __future__ import annotations

import pytest
from pictures import animated, broken_files, encoded, painted, png, png_that_says, turned
from PIL import Image

from millrace.errors import BadPicture
from millrace.media.decode import digest_of, frames, pixels
from millrace.media.limits import MediaLimits

LIMITS = MediaLimits()
PICTURE = painted()
DIGEST = digest_of(PICTURE)


def test_one_picture_has_one_digest_in_every_lossless_form() -> None:
    forms = [
        encoded(PICTURE),
        encoded(PICTURE, compress_level=0),
        encoded(PICTURE, "WEBP", lossless=True),
        encoded(PICTURE, "BMP"),
        encoded(PICTURE, "TIFF"),
        encoded(PICTURE.convert("RGBA")),
        turned(PICTURE),
        animated("WEBP", [PICTURE, painted(seed=2)]),
        encoded(PICTURE, save_all=True, append_images=[painted(seed=2)]),
    ]
    assert {digest_of(pixels(data, LIMITS)) for data in forms} == {DIGEST}


def test_other_pixels_or_another_size_is_another_digest() -> None:
    plain = Image.new("RGB", (6, 4), "red")
    found = {
        digest_of(pixels(encoded(image), LIMITS))
        for image in (plain, Image.new("RGB", (4, 6), "red"), Image.new("RGB", (6, 4), "#fe0000"))
    }
    assert len(found) == 3


def test_a_turned_photograph_is_upright() -> None:
    assert pixels(turned(PICTURE), LIMITS).tobytes() == PICTURE.tobytes()


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG", "TIFF"])
def test_of_an_animation_the_first_frame_counts(kind: str) -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "green", "blue")]
    assert pixels(animated(kind, frames), LIMITS).getpixel((3, 3)) == (255, 0, 0)


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_a_video_is_seen_by_two_frames_a_second(kind: str) -> None:
    shades = [Image.new("RGB", (8, 8), (n, n, n)) for n in range(0, 240, 8)]
    film = encoded(shades[0], kind, save_all=True, append_images=shades[1:], duration=100)
    seen = [frame.getpixel((3, 3)) for frame in frames(film, LIMITS)]
    assert len(seen) == 6  # of three seconds
    for number, pixel in enumerate(seen):
        assert isinstance(pixel, tuple) and abs(pixel[0] - 40 * number) <= 4
    assert len(frames(film, MediaLimits(most_frames=3))) == 2
    assert digest_of(*frames(film, LIMITS)) != digest_of(pixels(film, LIMITS))


def test_what_does_not_move_or_is_too_long_is_no_video() -> None:
    short = animated("GIF", [painted(seed=n) for n in range(4)])
    assert len(frames(short, LIMITS)) == 2
    for data, limits, why in (
        (png(), LIMITS, "does not move"),
        (short, MediaLimits(longest_film=3), "4 frames; 3 are the most"),
        (short, MediaLimits(most_pixels=48 * 32), "too large"),
        (short[: len(short) // 2], LIMITS, "broken"),
    ):
        with pytest.raises(BadPicture, match=why):
            frames(data, limits)


@pytest.mark.parametrize(
    ("image", "found"),
    [
        (Image.new("RGBA", (2, 2), (255, 0, 0, 0)), (255, 255, 255)),
        (Image.new("RGBA", (2, 2), (255, 0, 0, 255)), (255, 0, 0)),
        (Image.new("LA", (2, 2), (0, 0)), (255, 255, 255)),
        (Image.new("L", (2, 2), 7), (7, 7, 7)),
        (Image.new("1", (2, 2), 1), (255, 255, 255)),
        (Image.new("RGB", (2, 2), "blue").convert("P"), (0, 0, 255)),
        (Image.new("I;16", (2, 2), 0x8040), (128, 128, 128)),
    ],
)
def test_every_kind_of_pixel_becomes_red_green_and_blue(
    image: Image.Image, found: tuple[int, int, int]
) -> None:
    made = pixels(encoded(image), LIMITS)
    assert made.mode == "RGB"
    assert made.getpixel((0, 0)) == found


def test_photographs_for_print_are_taken() -> None:
    assert pixels(encoded(PICTURE.convert("CMYK"), "JPEG"), LIMITS).size == PICTURE.size


@pytest.mark.parametrize("name", broken_files())
def test_what_is_no_picture_or_too_large_is_refused(name: str) -> None:
    with pytest.raises(BadPicture) as refused:
        pixels(broken_files()[name], LIMITS)
    assert refused.value.status == 400
    assert len(refused.value.message) < 400


def test_the_limits_are_those_that_are_set() -> None:
    assert pixels(png(40, 40), MediaLimits(most_pixels=1600)).size == (40, 40)
    for limits in (MediaLimits(most_pixels=1599), MediaLimits(longest_side=39)):
        with pytest.raises(BadPicture, match="40 × 40"):
            pixels(png(40, 40), limits)
    with pytest.raises(BadPicture, match="60000 × 60000"):
        pixels(png_that_says(60_000, 60_000), LIMITS)


def test_a_file_cut_anywhere_is_refused_or_read_but_breaks_nothing() -> None:
    for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF"):
        whole = encoded(painted(16, 16), kind)
        for length in range(0, len(whole), 7):
            try:
                assert pixels(whole[:length], LIMITS).size == (16, 16)
            except BadPicture:
                continue
