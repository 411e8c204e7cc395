"""The text of PDFs: read within limits, and hostile files that cost nobody else anything."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import random
from collections.abc import AsyncIterator

import pdfs
import pytest

from millrace.caller import current_caller
from millrace.errors import BadDocument
from millrace.media.document import DocumentLimits, DocumentText, text_of
from millrace.serving.documents import DocumentDesk


def test_pages_are_read_in_their_order() -> None:
    for packed in (False, True):
        found = text_of(pdfs.pdf(["One (1)", "Two", "Three"], filter=packed), DocumentLimits())
        assert found == DocumentText("One (1)\n\nTwo\n\nThree", 3, 3)
        assert not found.truncated


def test_a_long_document_ends_at_the_limits() -> None:
    data = pdfs.pdf([f"Page {n}" for n in range(20)])
    pages = text_of(data, DocumentLimits(most_pages=3))
    assert (pages.text, pages.pages, pages.pages_read) == ("Page 0\n\nPage 1\n\nPage 2", 20, 3)
    assert pages.truncated
    characters = text_of(data, DocumentLimits(most_characters=8))
    assert (characters.text, characters.pages_read) == ("Page 0\n\nPa", 2)
    assert characters.truncated
    within = text_of(pdfs.pdf(["One long page"]), DocumentLimits(most_characters=8))
    assert (within.text, within.pages_read, within.truncated) == ("One long", 1, True)
    whole = text_of(pdfs.pdf(["One long", "page"]), DocumentLimits(most_characters=12))
    assert (whole.pages_read, whole.truncated) == (2, False)
    none = DocumentLimits(seconds=-1)
    with pytest.raises(BadDocument, match="no text"):
        text_of(data, none)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (pdfs.without_text(), "pictures"),
        (pdfs.locked(), "password"),
        (pdfs.circle(), "cyclic"),
        (pdfs.deep(), "cannot be read"),
        (b"%PDF-1.4 and nothing more", "cannot be read"),
        (pdfs.pdf(["Cut"])[:120], "cannot be read|no text"),
        (pdfs.locked().replace(b"/Standard", b"/Adobe.PubSec"), "uses what .* cannot read"),
        (
            pdfs.pdf(["A"], filter=True).replace(b"Flate", b"Fl\x05te"),
            "Unsupported filter /FlteDec",
        ),
    ],
    ids=["scan", "locked", "circle", "deep", "empty", "cut", "handler", "filter"],
)
def test_a_document_without_readable_text_is_refused_with_the_reason(
    data: bytes, reason: str
) -> None:
    with pytest.raises(BadDocument, match=reason):
        text_of(data, DocumentLimits())


def test_whatever_is_in_a_file_it_is_read_or_refused() -> None:
    chance = random.Random(5)
    whole = [pdfs.pdf(["One", "Two"], filter=True), pdfs.pdf(["a", "b"]), pdfs.locked()]
    words = (
        b"/Kids[2 0 R]",
        b"99999999999999999999",
        b"/Filter/LZWDecode",
        b"<<",
        b"/Contents 2 0 R",
    )
    for _ in range(300):
        data = bytearray(chance.choice(whole))
        for _ in range(chance.randint(1, 4)):
            at = chance.randrange(len(data))
            data[at : at + chance.choice((0, 1, 8))] = chance.choice((b"", b"\xff", *words))
        with contextlib.suppress(BadDocument):
            text_of(bytes(data), DocumentLimits(seconds=5))


@contextlib.asynccontextmanager
async def _desk(limits: DocumentLimits | None = None) -> AsyncIterator[DocumentDesk]:
    desk = DocumentDesk(limits)
    try:
        yield desk
    finally:
        desk.close()


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def test_a_document_is_read_in_a_process_of_its_own() -> None:
    async def run() -> None:
        async with _desk(DocumentLimits(most_bytes=4096)) as desk:
            plain = _base64(pdfs.pdf(["Hello"]))
            for given in (plain, f"data:application/pdf;base64,{plain}"):
                assert (await desk.text(given)).text == "Hello"
            for given, reason in (
                ("!", "base64"),
                ("data:application/pdf,abc", "data:TYPE;base64"),
                (_base64(b"PK\3\4 a zip"), "not a PDF"),
                (_base64(b"%PDF-" + bytes(9000)), "larger"),
                (_base64(pdfs.locked()), "password"),
            ):
                with pytest.raises(BadDocument, match=reason):
                    await desk.text(given)

    asyncio.run(run())


async def _of(caller: str, desk: DocumentDesk, data: bytes) -> DocumentText:
    current_caller.set(caller)
    return await desk.text(_base64(data))


def test_a_document_that_takes_too_long_is_ended_and_others_are_read_meanwhile() -> None:
    async def run() -> None:
        async with _desk(DocumentLimits(seconds=10, page_seconds=2)) as desk:
            slow = asyncio.create_task(_of("mallory", desk, pdfs.slow()))
            await asyncio.sleep(0.3)
            for number in range(3):
                found = await _of("ann", desk, pdfs.pdf([f"Number {number}"]))
                assert found.text == f"Number {number}"
            with pytest.raises(BadDocument, match="within 12 seconds"):
                await slow
            assert (await _of("mallory", desk, pdfs.pdf(["Next"]))).text == "Next"

    asyncio.run(run())


def test_a_document_that_takes_too_much_memory_ends_its_own_process_alone() -> None:
    async def run() -> None:
        async with _desk(DocumentLimits(memory=150 << 20)) as desk:
            with pytest.raises(BadDocument, match="memory|cannot be read"):
                await desk.text(_base64(pdfs.slow()))

    asyncio.run(run())
