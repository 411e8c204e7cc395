"""Pictures from web addresses: nothing is asked that should not be, and nothing takes for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest
from pictures import PictureSite, picture_site, png

from millrace.errors import BadPicture
from millrace.media.addresses import is_public
from millrace.media.fetch import Fetcher
from millrace.media.limits import MediaLimits
from millrace.media.sources import url_of

LIMITS = MediaLimits(fetch_seconds=60.0, most_bytes=1 << 20)


@pytest.fixture(scope="module")
def site() -> Iterator[PictureSite]:
    with picture_site() as found:
        found.pages["/a.png"] = (200, {}, png())
        yield found


@pytest.fixture(autouse=True)
def _forget(site: PictureSite) -> None:
    site.asked.clear()
    site.headers.clear()


def fetched(
    url: str,
    limits: MediaLimits = LIMITS,
    allows: Callable[[str], bool] = lambda address: address == "127.0.0.1",
    names: dict[str, list[list[str]]] | None = None,
) -> bytes:
    """`names` gives the answers to each look-up of a name, one after the other."""

    async def resolve(host: str, port: int) -> list[str]:
        return names[host].pop(0) if names and host in names else [host]

    async def work() -> bytes:
        fetcher = Fetcher(limits, allows=allows, resolve=resolve)
        try:
            return await fetcher.fetch(url_of(url))
        finally:
            fetcher.close()

    return asyncio.run(work())


def test_a_picture_is_fetched_without_telling_who_asks(
    site: PictureSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    assert fetched(site.url("/a.png")) == png()
    (headers,) = site.headers
    assert {name.lower() for name in headers} == {
        *("host", "user-agent", "accept", "accept-encoding", "connection")
    }


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "localhost",
        "[::1]",
        "[::ffff:127.0.0.1]",
        "0.0.0.0",
        "2130706433",
        "127.1",
        "0x7f.1",
    ],
)
def test_this_machine_is_never_asked(site: PictureSite, host: str) -> None:
    async def work() -> bytes:
        fetcher = Fetcher(LIMITS)
        try:
            return await fetcher.fetch(url_of(site.url("/a.png", host)))
        finally:
            fetcher.close()

    with pytest.raises(BadPicture, match="public|fetched"):
        asyncio.run(work())
    assert site.asked == []


@pytest.mark.parametrize(
    "addresses",
    [
        ["10.0.0.1"],
        ["8.8.8.8", "127.0.0.1"],
        ["127.0.0.1", "8.8.8.8"],
        ["fe80::1%lo"],
        ["169.254.169.254"],
        [],
    ],
)
def test_a_name_with_any_address_that_is_not_public_is_not_asked(
    site: PictureSite, addresses: list[str]
) -> None:
    with pytest.raises(BadPicture, match="not on the public internet"):
        fetched(site.url("/a.png", "x.test"), allows=is_public, names={"x.test": [addresses]})
    assert site.asked == []


def test_the_checked_address_is_the_one_that_is_asked(site: PictureSite) -> None:
    # A second look-up would find another address; there is none.
    names = {"x.test": [["127.0.0.1"], ["10.9.9.9"]]}
    assert fetched(site.url("/a.png", "x.test"), names=names) == png()
    assert names == {"x.test": [["10.9.9.9"]]}
    assert site.headers[0]["Host"] == f"x.test:{site.port}"


def test_redirects_are_followed_and_checked_anew(site: PictureSite) -> None:
    site.pages["/on"] = (302, {"Location": "/a.png"}, b"")
    assert fetched(site.url("/on")) == png()
    names = {"x.test": [["127.0.0.1"], ["10.9.9.9"]]}
    site.pages["/again"] = (307, {"Location": site.url("/a.png", "x.test")}, b"")
    with pytest.raises(BadPicture, match="not on the public internet"):
        fetched(site.url("/again", "x.test"), names=names)
    assert site.asked == ["/on", "/a.png", "/again"]


@pytest.mark.parametrize(
    ("location", "says"),
    [
        ("http://169.254.169.254/latest/meta-data/", "public"),
        ("http://10.0.0.1/", "public"),
        ("http://[::1]/", "public"),
        ("//0.0.0.0/", "public"),
        ("file:///etc/passwd", "file"),
        ("data:image/png;base64,AAAA", "data"),
        ("gopher://127.0.0.1/", "gopher"),
        ("http://user:secret@127.0.0.1/", "user"),
        ("http://127.0.0.1:22/", "port"),
        ("http://[", "no address"),
        ("", "not where"),
    ],
)
def test_a_redirect_to_somewhere_else_is_refused(
    site: PictureSite, location: str, says: str
) -> None:
    site.pages["/away"] = (301, {"Location": location} if location else {}, b"")
    with pytest.raises(BadPicture, match=says):
        fetched(site.url("/away"))
    assert site.asked == ["/away"]


def test_redirects_are_few(site: PictureSite) -> None:
    site.pages["/round"] = (302, {"Location": "/round"}, b"")
    with pytest.raises(BadPicture, match="more than 3 times"):
        fetched(site.url("/round"))
    assert len(site.asked) == 4


@pytest.mark.parametrize("path", ["/slow", "/silent"])
def test_a_slow_server_is_given_up(site: PictureSite, path: str) -> None:
    with pytest.raises(BadPicture, match="within 0.3 seconds"):
        fetched(site.url(path), MediaLimits(fetch_seconds=0.3))


def test_a_slow_answer_to_a_name_is_given_up() -> None:
    async def resolve(host: str, port: int) -> list[str]:
        await asyncio.sleep(30)
        return []

    async def work() -> None:
        fetcher = Fetcher(MediaLimits(fetch_seconds=0.2), resolve=resolve)
        await fetcher.fetch(url_of("http://x.test/"))

    with pytest.raises(BadPicture, match="within 0.2 seconds"):
        asyncio.run(work())


@pytest.mark.parametrize("path", ["/endless", "/says-much", "/says-absurd"])
def test_what_is_too_large_is_given_up(site: PictureSite, path: str) -> None:
    site.pages["/says-much"] = (200, {"Content-Length": str(1 << 40)}, b"x")
    site.pages["/says-absurd"] = (200, {"Content-Length": "9" * 19}, b"x")
    with pytest.raises(BadPicture, match="larger than 1.0 MB"):
        fetched(site.url(path))


@pytest.mark.parametrize(
    ("page", "says"),
    [
        ((404, {}, b""), "404"),
        ((500, {}, b"no"), "500"),
        ((204, {}, b""), "204"),
        ((206, {}, png()), "206"),
        ((200, {"Content-Encoding": "gzip"}, b"x"), "packed"),
        ((200, {}, b""), "empty"),
        ((200, {"Content-Length": "5000"}, b"x"), "fetched|within"),
        ((200, {"Transfer-Encoding": "chunked", "Content-Length": "5"}, b"zzzzz"), "fetched"),
        ((200, {"X": "a" * 200_000}, b"x"), "fetched"),
    ],
)
def test_odd_answers_are_refused(
    site: PictureSite, page: tuple[int, dict[str, str], bytes], says: str
) -> None:
    site.pages["/odd"] = page
    with pytest.raises(BadPicture, match=says):
        fetched(site.url("/odd"))


def test_nobody_there_is_an_error_of_the_request() -> None:
    with pytest.raises(BadPicture, match="could not be fetched"):
        fetched("http://127.0.0.1:9009/")
