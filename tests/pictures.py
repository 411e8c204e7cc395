"""Pictures for tests: good ones in every form, and files that are hostile, broken or something else."""

from __future__ import annotations

import base64
import functools
import io
import random
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread
from typing import Any

from PIL import Image


def painted(width: int = 48, height: int = 32, seed: int = 1) -> Image.Image:
    """A picture of coloured noise in squares, which no two seeds have in common."""
    draw = random.Random(seed)
    small = Image.new("RGB", (max(1, width // 8), max(1, height // 8)))
    small.putdata(
        [tuple(draw.randrange(256) for _ in range(3)) for _ in range(small.width * small.height)]
    )
    return small.resize((width, height), Image.Resampling.NEAREST)


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def png(width: int = 48, height: int = 32, seed: int = 1) -> bytes:
    return encoded(painted(width, height, seed))


def data_uri(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def turned(image: Image.Image) -> bytes:
    """A PNG that is stored on its side, and says so."""
    exif = Image.Exif()
    exif[0x0112] = 6
    return encoded(image.transpose(Image.Transpose.ROTATE_90), exif=exif.tobytes())


def animated(kind: str, images: list[Image.Image]) -> bytes:
    lossless = {"lossless": True} if kind == "WEBP" else {}
    return encoded(images[0], kind, save_all=True, append_images=images[1:], **lossless)


def chunk(kind: bytes, data: bytes) -> bytes:
    body = kind + data
    return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))


def png_that_says(width: int, height: int, body: bytes = b"") -> bytes:
    """A PNG of any claimed size, whatever is really in it."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", head)
        + chunk(b"IDAT", body or zlib.compress(bytes(1000)))
        + chunk(b"IEND", b"")
    )


@functools.cache
def broken_files() -> dict[str, bytes]:
    """Files that are no pictures, or not ones that may be decoded."""
    good = png()
    jpeg = encoded(painted(), "JPEG")
    webp = encoded(painted(), "WEBP", lossless=True)
    gif = encoded(painted(), "GIF")
    tiff = encoded(painted(), "TIFF")
    return {
        "svg": b'<svg xmlns="http://www.w3.org/2000/svg"><rect width="9" height="9"/></svg>',
        "svg with a heading": b'<?xml version="1.0"?><!DOCTYPE svg [<!ENTITY a "b">]><svg>&a;</svg>',
        "web page": b"<!DOCTYPE html><html><body>Not found</body></html>",
        "pdf": b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n1 0 obj<<>>endobj",
        "heic": b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(64),
        "video": b"\0\0\0\x18ftypisom\0\0\0\0isommp42" + bytes(64),
        "matroska": b"\x1a\x45\xdf\xa3" + bytes(64),
        "text": b"hello, I am no picture",
        "zeros": bytes(4096),
        "noise": random.Random(0).randbytes(4096),
        "executable": b"\x7fELF" + bytes(200),
        "gzip": b"\x1f\x8b\x08\0\0\0\0\0" + bytes(100),
        "zip": b"PK\x03\x04" + bytes(100),
        "postscript": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\nquit",
        "ppm": b"P6 2 2 255 " + bytes(12),
        "only a signature": b"\x89PNG\r\n\x1a\n",
        "png cut short": good[: len(good) // 2],
        "png without an end of its data": good[:60],
        "png with other bytes inside": good[:50] + bytes(40) + good[90:],
        "jpeg cut short": jpeg[: len(jpeg) // 2],
        "jpeg head": jpeg[:20],
        "webp cut short": webp[: len(webp) // 2],
        "gif cut short": gif[:40],
        "tiff cut short": tiff[: len(tiff) // 2],
        "riff that is no webp": b"RIFF\x24\0\0\0WAVEfmt " + bytes(32),
        "bomb by its sides": png_that_says(60_000, 60_000),
        "bomb in one row": png_that_says(2_000_000_000, 1),
        "bomb just above": png_that_says(8_001, 8_000),
        "no width": png_that_says(0, 10),
        "packed zeros": png_that_says(30_000, 30_000, zlib.compress(bytes(4_000_000), 9)),
        "packed text": _with_chunk(good, b"zTXt", b"k\0\0" + zlib.compress(bytes(8_000_000), 9)),
        "bmp bomb": _bmp(60_000, 60_000),
        "bmp of negative size": _bmp(-5, -5),
        "gif bomb": b"GIF89a" + struct.pack("<HH", 65_535, 65_535) + bytes(20),
        "icon": b"\0\0\x01\0\x01\0\x10\x10\0\0\x01\0\x18\0" + bytes(100),
    }


def _with_chunk(png: bytes, kind: bytes, data: bytes) -> bytes:
    return png[:33] + chunk(kind, data) + png[33:]


def _bmp(width: int, height: int) -> bytes:
    head = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 24, 0, 0, 0, 0, 0, 0)
    return b"BM" + struct.pack("<IHHI", 200, 0, 0, 54) + head + bytes(100)


class PictureSite:
    """A web site on this machine that serves pictures, leads astray, or takes its time."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.pages: dict[str, tuple[int, dict[str, str], bytes]] = {}
        self.let_go = Event()
        site = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                site.answer(self)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        self._thread = Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def url(self, path: str, host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.port}{path}"

    def answer(self, http: BaseHTTPRequestHandler) -> None:
        self.asked.append(http.path)
        self.headers.append(dict(http.headers))
        if http.path.startswith("/slow"):
            # A head, then a byte now and then, until the test is over.
            http.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
            while not self.let_go.wait(0.05):
                try:
                    http.wfile.write(b"x")
                except OSError:
                    return
            return
        if http.path.startswith("/silent"):
            self.let_go.wait(30)
            return
        if http.path.startswith("/endless"):
            http.wfile.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
            try:
                while not self.let_go.is_set():
                    http.wfile.write(bytes(1 << 16))
            except OSError:
                pass
            return
        status, headers, body = self.pages.get(http.path, (404, {}, b"nothing here"))
        http.send_response(status)
        for name, value in headers.items():
            http.send_header(name, value)
        if "Content-Length" not in headers:
            http.send_header("Content-Length", str(len(body)))
        http.end_headers()
        http.wfile.write(body)

    def close(self) -> None:
        self.let_go.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@contextmanager
def picture_site() -> Iterator[PictureSite]:
    site = PictureSite()
    try:
        yield site
    finally:
        site.close()
