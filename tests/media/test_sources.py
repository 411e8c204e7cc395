"""The one string that says where a picture is: read, bounded, and refused in words."""

from __future__ import annotations

import base64
import os
from pathlib import Path

import pytest
from pictures import data_uri, png

from millrace.errors import BadPicture
from millrace.media.limits import MediaLimits
from millrace.media.sources import Inline, Local, Remote, read_local, source_of, url_of

LIMITS = MediaLimits(most_bytes=1000)
SMALL = b"\x00\xff\xfe some bytes"


@pytest.mark.parametrize(
    "text",
    [
        base64.b64encode(SMALL).decode(),
        base64.b64encode(SMALL).decode().rstrip("="),
        base64.urlsafe_b64encode(SMALL).decode(),
        f" {base64.encodebytes(SMALL).decode()} ",
        data_uri(SMALL),
        data_uri(SMALL).replace("data:", "DATA:"),
        data_uri(SMALL, "image/png;charset=utf-8"),
        data_uri(SMALL, ""),
        data_uri(SMALL).replace("/", "%2F").replace("image%2Fpng", "image/png"),
        "data:image/png,%00%FF%FE some%20bytes",
    ],
)
def test_bytes_may_come_in_any_spelling(text: str) -> None:
    assert source_of(text, LIMITS) == Inline(SMALL)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "empty"),
        ("data:image/png;base64,", "empty"),
        ("data:image/png;base64", "comma"),
        ("data:text/html;base64,AAAA", "text/html"),
        ("data:application/pdf;base64,AAAA", "pdf"),
        ("data:image/png;base64,A", "base64"),
        ("data:image/png;base64,AA!A", "base64"),
        ("data:image/png;base64,ÄÄÄÄ", "base64"),
        ("not base64 at all!", "base64"),
        ("A" * 5000, "larger"),
        ("A" * 1400, "larger"),
        ("data:image/png;base64," + "A" * 5000, "larger"),
        ("data:image/png," + "A" * 1001, "larger"),
        ("data:image/png," + "A" * 10000, "larger"),
        ("ftp://example.org/a.png", "ftp"),
        ("gopher://example.org/", "gopher"),
        ("javascript:alert(1)", "javascript"),
        ("file://other/etc/passwd", "machine"),
        ("file:relative.png", "whole path"),
        ("http://[::1", "none"),
        ("http://", "host"),
        ("http://a b/", "host"),
        ("http://user:secret@example.org/", "user"),
        ("http://user@example.org/", "user"),
        ("http://example.org:99999/", "none"),
        ("http://example.org:22/", "port 22"),
        ("http://example.org:25/", "port 25"),
        ("http://" + "a" * 64 + ".org/", "host"),
        ("http://exa%6dple.org/", "host"),
        ("http://example.org/" + "a" * 9000, "longer"),
    ],
)
def test_what_is_no_source_is_refused_in_words(text: str, says: str) -> None:
    with pytest.raises(BadPicture, match=says):
        source_of(text, LIMITS)


def test_web_addresses_are_taken_apart() -> None:
    assert source_of("https://Example.org/a?b=c#d", LIMITS) == Remote(
        url_of("https://example.org/a?b=c")
    )
    assert url_of("http://example.org").text == "http://example.org/"
    assert url_of("https://example.org:8443/a b/ü?q= \r\nX: y").text == (
        "https://example.org:8443/a%20b/%C3%BC?q=%20X:%20y"
    )
    assert url_of("http://[2606:4700::1]:8080/").text == "http://[2606:4700::1]:8080/"
    assert url_of("http://bücher.example/").host == "xn--bcher-kva.example"


def test_web_addresses_may_be_off() -> None:
    with pytest.raises(BadPicture, match="--no-remote-media"):
        source_of("https://example.org/a.png", MediaLimits(remote=False))


def test_files_are_read_in_the_folders_that_are_open_and_nowhere_else(tmp_path: Path) -> None:
    opened, closed = tmp_path / "open", tmp_path / "open-not"
    for folder in (opened, closed):
        folder.mkdir()
        (folder / "a picture.png").write_bytes(png())
    (opened / "link.png").symlink_to(closed / "a picture.png")
    (opened / "folder").symlink_to(closed)
    os.mkfifo(opened / "pipe")
    limits = MediaLimits(folders=(str(opened),))

    found = source_of(f"file://{opened}/a%20picture.png", limits)
    assert found == Local(f"{opened}/a picture.png")
    assert read_local(f"{opened}/a picture.png", limits) == png()
    assert read_local(f"{opened}/../open/a picture.png", limits) == png()
    for path in (
        f"{closed}/a picture.png",
        f"{opened}/../open-not/a picture.png",
        f"{opened}/link.png",
        f"{opened}/folder/a picture.png",
        f"{opened}/pipe",
        f"{opened}",
        f"{opened}/nothing",
        "/etc/passwd",
        "/proc/self/environ",
    ):
        with pytest.raises(BadPicture, match="no such picture"):
            read_local(path, limits)
    with pytest.raises(BadPicture, match="larger"):
        read_local(f"{opened}/a picture.png", MediaLimits(folders=(str(opened),), most_bytes=10))
    with pytest.raises(BadPicture, match="--allow-local-media"):
        read_local(f"{opened}/a picture.png", MediaLimits())
