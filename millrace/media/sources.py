"""Where a picture is said to be: in the request itself, at a web address, in a file.

Owns the reading of that one string, whatever protocol it came in; opens nothing but files inside the
folders that the operator named.
"""

from __future__ import annotations

import binascii
import os
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import SplitResult, unquote, unquote_to_bytes, urlsplit

from millrace.errors import BadPicture
from millrace.media.limits import MediaLimits
from millrace.sizes import format_bytes

_SCHEME = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]{0,31}:")
_HOST = re.compile(r"[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?(\.[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?)*\.?")
_LONGEST_URL = 8192
_PIECE = 1 << 17
"""Characters that are decoded at a time: whole groups of four."""
_LEAST_PORT = 1024
"""Below it, only those of the web are asked: the others are of services that a picture is not with."""


@dataclass(frozen=True)
class Inline:
    """The file itself."""

    data: bytes


@dataclass(frozen=True)
class Remote:
    url: Url


@dataclass(frozen=True)
class Local:
    path: str


@dataclass(frozen=True)
class Url:
    """A web address that may be asked, as far as can be told before its name is looked up."""

    scheme: str
    host: str
    port: int
    target: str

    @property
    def text(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        default = {"http": 80, "https": 443}[self.scheme]
        port = "" if self.port == default else f":{self.port}"
        return f"{self.scheme}://{host}{port}{self.target}"


Source = Inline | Remote | Local


def source_of(text: str, limits: MediaLimits) -> Source:
    """A data URI, a web address, a file: address, or the file in base64."""
    text = text.strip()
    scheme = match[0][:-1].lower() if (match := _SCHEME.match(text)) else None
    match scheme:
        case None:
            return Inline(_base64(text, limits))
        case "data":
            return Inline(_data_uri(text, limits))
        case "http" | "https":
            if not limits.remote:
                raise BadPicture(
                    "This server fetches no pictures from web addresses (--no-remote-media). Send "
                    "the picture itself, as a data URI."
                )
            return Remote(url_of(text))
        case "file":
            return Local(_path(text))
        case _:
            raise BadPicture(
                f"A picture's address cannot begin with '{scheme}:'; give a data URI or an http(s) "
                "address."
            )


def url_of(text: str) -> Url:
    """Raises what is wrong with the address."""
    if len(text) > _LONGEST_URL:
        raise BadPicture(f"The picture's address is longer than {_LONGEST_URL} characters.")
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as error:
        raise BadPicture(f"The picture's address is none: {error}.") from error
    if parts.scheme not in ("http", "https"):
        raise BadPicture(
            f"The picture's address leads to one that begins with '{parts.scheme}:', which is not "
            "fetched."
        )
    if parts.username is not None or parts.password is not None:
        raise BadPicture("The picture's address holds a user's name, which is not sent anywhere.")
    if port is None:
        port = 443 if parts.scheme == "https" else 80
    if port not in (80, 443) and port < _LEAST_PORT:
        raise BadPicture(f"Pictures are not fetched from port {port}.")
    return Url(parts.scheme, _host(parts), port, _target(parts))


def _host(parts: SplitResult) -> str:
    host = (parts.hostname or "").lower()
    if ":" in host:
        return host  # an IPv6 address, which is read before it is used
    try:
        plain = host.encode("idna").decode("ascii") if host else ""
    except UnicodeError as error:
        raise BadPicture("The picture's address has a host that is no name.") from error
    if not _HOST.fullmatch(plain):
        raise BadPicture("The picture's address has a host that is no name.")
    return plain


def _target(parts: SplitResult) -> str:
    path = parts.path or "/"
    text = f"{path}?{parts.query}" if parts.query else path
    # Characters that no address may hold as they are, written as clients write them.
    return "".join(c if "!" <= c <= "~" else _escaped(c) for c in text)


def _escaped(character: str) -> str:
    return "".join(f"%{byte:02X}" for byte in character.encode("utf-8", "replace"))


def _data_uri(text: str, limits: MediaLimits) -> bytes:
    head, comma, body = text.partition(",")
    if not comma:
        raise BadPicture("A data URI needs a comma between its type and its data.")
    kind, *options = head[len("data:") :].split(";")
    kind = unquote(kind).strip().lower()
    # Which files are taken is told from what is in them, not from what they are said to be.
    if kind and not kind.startswith(("image/", "video/")) and kind != "application/octet-stream":
        raise BadPicture(f"A data URI of type '{kind[:100]}' is no picture.")
    if any(option.strip().lower() == "base64" for option in options):
        return _base64(unquote(body) if "%" in body else body, limits)
    if len(body) > 3 * limits.most_bytes:
        raise _too_large(limits)
    return _bounded(unquote_to_bytes(body), limits)


def _base64(text: str, limits: MediaLimits) -> bytes:
    # Lines are broken every 64 characters at the most often.
    if len(text) > limits.most_bytes * 3 // 2:
        raise _too_large(limits)
    packed = "".join(text.split()) if any(space in text for space in " \n\r\t") else text
    if "-" in packed or "_" in packed:
        packed = packed.replace("-", "+").replace("_", "/")
    packed = packed.rstrip("=")
    packed += "=" * (-len(packed) % 4)
    data = bytearray()
    try:
        # A piece at a time: each holds the interpreter's lock, which streams wait for.
        for at in range(0, len(packed), _PIECE):
            piece = packed[at : at + _PIECE].encode("ascii")
            data += binascii.a2b_base64(piece, strict_mode=True)
    except (binascii.Error, UnicodeEncodeError) as error:
        raise BadPicture(f"The picture is no valid base64: {_reason(error)}.") from error
    return _bounded(bytes(data), limits)


def _reason(error: Exception) -> str:
    return "it holds other characters" if isinstance(error, UnicodeEncodeError) else str(error)


def _bounded(data: bytes, limits: MediaLimits) -> bytes:
    if len(data) > limits.most_bytes:
        raise _too_large(limits)
    if not data:
        raise BadPicture("The picture is empty.")
    return data


def _too_large(limits: MediaLimits) -> BadPicture:
    most = format_bytes(limits.most_bytes)
    return BadPicture(f"The picture is larger than {most}, the limit here.")


def _path(text: str) -> str:
    try:
        parts = urlsplit(text)
    except ValueError as error:
        raise BadPicture(f"The picture's address is none: {error}.") from error
    if parts.netloc not in ("", "localhost"):
        raise BadPicture("A file: address names no other machine.")
    path = unquote(parts.path)
    if not path.startswith("/") or "\0" in path:
        raise BadPicture("A file: address needs the whole path, like file:///folder/picture.png.")
    return path


def read_local(path: str, limits: MediaLimits) -> bytes:
    """A file inside the folders that are open to requests. Blocks: not for the event loop."""
    if not limits.folders:
        raise BadPicture(
            "This server reads no pictures from its own files (--allow-local-media names the "
            "folders that it may). Send the picture itself, as a data URI."
        )
    # What is outside is told nothing about, be it there or not.
    closed = BadPicture("There is no such picture in the folders that this server may read.")
    try:
        real = Path(path).resolve(strict=True)
    except (OSError, RuntimeError, ValueError):
        raise closed from None
    if not _inside(real, limits.folders):
        raise closed
    try:
        # What it leads to was found out above: if it is a link now, somebody has put it there.
        file = os.open(real, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        raise closed from None
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise closed
    with os.fdopen(file, "rb") as opened:
        return _bounded(opened.read(limits.most_bytes + 1), limits)


def _inside(path: Path, folders: Sequence[str]) -> bool:
    return any(path.is_relative_to(Path(f).expanduser().resolve()) for f in folders)
