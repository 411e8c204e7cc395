"""PDFs for tests, written by hand: pages of text, and files that mean harm."""

from __future__ import annotations

import zlib
from collections.abc import Sequence


def pdf(pages: Sequence[str], *, filter: bool = False) -> bytes:
    """A PDF with a line of text on each page."""
    streams = [f"BT /F1 12 Tf 40 700 Td ({_escaped(text)}) Tj ET".encode() for text in pages]
    return of_streams(streams, packed=filter)


def of_streams(streams: Sequence[bytes], *, packed: bool = False) -> bytes:
    """A PDF whose pages have these contents."""
    kids = " ".join(f"{4 + 2 * n} 0 R" for n in range(len(streams)))
    objects = [
        b"<</Type/Catalog/Pages 2 0 R>>",
        f"<</Type/Pages/Kids[{kids}]/Count {len(streams)}>>".encode(),
        b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>",
    ]
    for number, stream in enumerate(streams):
        data = zlib.compress(stream, 9) if packed else stream
        how = "/Filter/FlateDecode" if packed else ""
        page = f"<</Type/Page/Parent 2 0 R/Resources<</Font<</F1 3 0 R>>>>/Contents {5 + 2 * number} 0 R>>"
        objects += [
            page.encode(),
            f"<</Length {len(data)}{how}>>stream\n".encode() + data + b"\nendstream",
        ]
    return written(objects)


def written(objects: Sequence[bytes], trailer: bytes = b"") -> bytes:
    """Objects 1, 2, ... as a file, the first of which is the catalogue."""
    out = bytearray(b"%PDF-1.4\n")
    places = []
    for number, content in enumerate(objects, 1):
        places.append(len(out))
        out += f"{number} 0 obj".encode() + content + b"\nendobj\n"
    start = len(out)
    out += f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n".encode()
    for place in places:
        out += f"{place:010} 00000 n \n".encode()
    out += f"trailer<</Root 1 0 R/Size {len(objects) + 1}".encode() + trailer
    out += f">>\nstartxref\n{start}\n%%EOF\n".encode()
    return bytes(out)


def without_text() -> bytes:
    """One page with a line and no words, as a scan has none."""
    return of_streams([b"0 0 m 100 100 l S"])


def locked() -> bytes:
    """A file that claims to be encrypted with a password."""
    encrypt = (
        b"/Encrypt<</Filter/Standard/V 1/R 2/P -4/Length 40/O<" + b"41" * 32 + b">/U<" + b"42" * 32
    )
    return written(
        [b"<</Type/Catalog/Pages 2 0 R>>", b"<</Type/Pages/Kids[]/Count 0>>"],
        encrypt + b">>>/ID[<00><00>]",
    )


def bomb(size: int = 400_000_000) -> bytes:
    """A page whose content is far larger once it is unpacked."""
    packer = zlib.compressobj(9)
    part = b"(aaaaaaaaaaaaaaaa) Tj " * 50_000
    data = b"".join(packer.compress(part) for _ in range(size // len(part))) + packer.flush()
    page = b"<</Type/Page/Parent 2 0 R/Resources<</Font<</F1 3 0 R>>>>/Contents 5 0 R>>"
    stream = f"<</Length {len(data)}/Filter/FlateDecode>>stream\n".encode() + data + b"\nendstream"
    return written(
        [
            b"<</Type/Catalog/Pages 2 0 R>>",
            b"<</Type/Pages/Kids[4 0 R]/Count 1>>",
            b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>",
            page,
            stream,
        ]
    )


def slow() -> bytes:
    """A page that takes a parser minutes: millions of operators."""
    return of_streams([b"BT /F1 12 Tf " + b"1 0 0 1 0 0 Tm (a) Tj " * 3_000_000], packed=True)


def circle() -> bytes:
    """Pages that are each other's parents."""
    return written(
        [
            b"<</Type/Catalog/Pages 2 0 R>>",
            b"<</Type/Pages/Kids[3 0 R]/Count 1>>",
            b"<</Type/Pages/Kids[2 0 R]/Count 1>>",
        ]
    )


def deep() -> bytes:
    """An array inside an array inside an array ..."""
    nested = b"[" * 100_000 + b"]" * 100_000
    return written([b"<</Type/Catalog/Pages 2 0 R/X " + nested + b">>", b"<</Kids[]/Count 0>>"])


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("(", "\\(").replace(")", "\\)")
