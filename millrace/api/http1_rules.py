"""HTTP/1.1 as this server accepts it: h11's parser, without what it reads more leniently than it must.

A proxy in front of the server may read a lenient form in another way and see another request where this one
ends. Every form that is refused here is one that no client library writes.
"""

from __future__ import annotations

import re
from typing import Any

import h11
from h11._receivebuffer import ReceiveBuffer

from millrace.api import authority

LARGEST_HEAD = 65536
"""Bytes of a request line and its headers together, and of a chunked body's trailers."""
LARGEST_CHUNK = 1 << 32
"""Bytes of one chunk of a body, where nothing else is said."""
_END = b"\r\n\r\n"
_BAD_HEAD = re.compile(
    rb"(?<!\r)\n|\r(?=[^\n])"  # a line ends with both
    rb"|\r\n[ \t]"  # a folded header
    rb"|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]"
)
_CHUNK_HEAD = re.compile(rb"[0-9A-Fa-f]{1,16}\r\n")
_LONGEST_CHUNK_HEAD = 18
_FREE_CHUNKS, _LEAST_CHUNK = 2048, 64
"""Chunks that a body may have whatever their sizes, and the mean size beyond that."""
_ABSOLUTE = re.compile(rb"https?://([^/?#]*)(/[^#]*)?", re.IGNORECASE)
_STATUSES = (413, 417, 431, 505)
"""Those that a refusal may have in place of 400."""
_LONGEST_REASON = 300
_VERSIONS = (b"1.0", b"1.1")


class _Buffer(ReceiveBuffer):
    """Finds the ends of heads and of chunk sizes, and refuses them as soon as they are wrong."""

    def __init__(self, largest_head: int, largest_chunk: int) -> None:
        super().__init__()
        self._largest_head = largest_head
        self._largest_chunk = largest_chunk
        self._checked = 0
        """Bytes at the start of the data that were found to be right, and hold no end."""

    def _extract(self, count: int) -> bytearray:
        self._checked = 0
        return super()._extract(count)

    def maybe_extract_lines(self) -> list[bytearray] | None:
        """The lines of a head or of trailers, once they are complete."""
        if self._data[:2] == b"\r\n":
            self._extract(2)
            return []
        begin = max(0, self._checked - len(_END) + 1)
        end = self._data.find(_END, begin)
        stop = len(self._data) if end < 0 else end + len(_END)
        if (fault := _BAD_HEAD.search(self._data, begin, stop)) is not None:
            raise h11.LocalProtocolError(_named(fault[0]))
        if stop > self._largest_head:
            raise h11.LocalProtocolError(
                f"the headers are larger than {self._largest_head} bytes", error_status_hint=431
            )
        if end < 0:
            self._checked = len(self._data)
            return None
        return self._extract(stop)[: -len(_END)].split(b"\r\n")

    def maybe_extract_next_line(self) -> bytearray | None:
        """The size of a chunk, once its line is complete; sizes have no extensions."""
        end = self._data.find(b"\r\n", 0, _LONGEST_CHUNK_HEAD)
        if end >= 0 and _CHUNK_HEAD.fullmatch(self._data, 0, end + 2):
            if int(self._data[:end], 16) > self._largest_chunk:
                raise h11.LocalProtocolError(
                    f"a chunk of its body is larger than {self._largest_chunk} bytes",
                    error_status_hint=413,
                )
            return self._extract(end + 2)
        # Without an end, the bytes so far must be able to begin a size.
        begun = bytes(self._data[:_LONGEST_CHUNK_HEAD]).removesuffix(b"\r")
        if end < 0 and re.fullmatch(rb"[0-9A-Fa-f]{0,16}", begun):
            return None
        raise h11.LocalProtocolError("the size of a chunk is not a hexadecimal number alone")


def _named(fault: bytes) -> str:
    if fault.endswith((b" ", b"\t")):
        return "a header is folded over several lines"
    if fault in (b"\r", b"\n"):
        return "a line does not end with CR LF"
    return "there is a control character in the headers"


class StrictConnection(h11.Connection):
    """A connection that keeps the reason for which it refused to read on."""

    def __init__(
        self, largest_head: int = LARGEST_HEAD, largest_chunk: int = LARGEST_CHUNK
    ) -> None:
        super().__init__(h11.SERVER, largest_head)
        self._receive_buffer = self._received = _Buffer(largest_head, largest_chunk)
        self.fault: h11.RemoteProtocolError | None = None
        self._chunks = self._chunk_bytes = 0

    @property
    def is_begun(self) -> bool:
        """Whether bytes have arrived that belong to no request yet."""
        return bool(self._received)

    @property
    def is_head(self) -> bool:
        """Whether the last request that was begun is a HEAD, whose answer has no body."""
        return self._request_method == b"HEAD"

    def next_event(self) -> Any:
        try:
            event = super().next_event()
            if isinstance(event, h11.Data):
                self._count(event)
            elif event is not h11.NEED_DATA:
                self._chunks = self._chunk_bytes = 0
            return _checked(event) if isinstance(event, h11.Request) else event
        except h11.RemoteProtocolError as error:
            self.fault = self.fault or error
            raise

    def _count(self, data: h11.Data) -> None:
        """Refuse a body in tiny chunks: each costs as much time as a large one."""
        self._chunks += data.chunk_start
        self._chunk_bytes += len(data.data)
        whole = self._chunks - 1  # the last one may have come in part
        if whole > _FREE_CHUNKS and self._chunk_bytes < _LEAST_CHUNK * whole:
            raise h11.RemoteProtocolError(
                f"its body comes in more than {_FREE_CHUNKS} chunks of less than {_LEAST_CHUNK} bytes"
            )

    def why_refused(self) -> tuple[int, str]:
        """The status and the sentence that a client gets whose request was refused."""
        if self.fault is None:
            return 400, "The request is not valid HTTP."
        status = self.fault.error_status_hint
        reason = str(self.fault)[:_LONGEST_REASON]
        return status if status in _STATUSES else 400, f"The request is refused: {reason}."


def _checked(request: h11.Request) -> h11.Request:
    """The request, with its target as a path."""
    if request.http_version not in _VERSIONS:
        raise h11.RemoteProtocolError("this server speaks HTTP/1.1", error_status_hint=505)
    headers = dict(request.headers)
    if b"transfer-encoding" in headers and (
        b"content-length" in headers or request.http_version < b"1.1"
    ):
        raise h11.RemoteProtocolError("it gives its length in two ways")
    if request.http_version == b"1.1" and _expects_more(request):
        raise h11.RemoteProtocolError(
            "its Expect header asks for something else than 100-continue", error_status_hint=417
        )
    host = headers.get(b"host", b"")
    if host and authority.parse(host.decode("latin-1")) is None:
        raise h11.RemoteProtocolError("the Host header is not a name or an address with its port")
    if request.target.startswith(b"/") or (request.method, request.target) == (b"OPTIONS", b"*"):
        return request
    absolute = _ABSOLUTE.fullmatch(request.target)
    # What a proxy is sent: it is served where both places name the same host.
    if absolute is None or absolute[1].lower() != host.lower() or not host:
        raise h11.RemoteProtocolError("its target is neither a path nor an address on this host")
    return h11.Request(
        method=request.method,
        target=absolute[2] or b"/",
        headers=request.headers.raw_items(),  # type: ignore[attr-defined]
        http_version=request.http_version,
    )


def _expects_more(request: h11.Request) -> bool:
    """Whether the client expects what this server does not know, and so may wait for it for ever."""
    expected = b",".join(value for name, value in request.headers if name == b"expect")
    return any(e.strip().lower() not in (b"", b"100-continue") for e in expected.split(b","))
