"""A picture from the web, fetched for a stranger: only from public addresses, only so much, only so long.

A name is looked up once for each connection, all its addresses are checked, and the connection is made
to the address that was checked: a name that changes its answer changes nothing. Redirects begin anew.
"""

from __future__ import annotations

import asyncio
import functools
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urljoin

import httpcore

from millrace.errors import BadPicture
from millrace.fair_semaphore import FairSemaphore
from millrace.media.addresses import is_public
from millrace.media.limits import MediaLimits
from millrace.media.sources import Url, url_of
from millrace.sizes import format_bytes
from millrace.version import __version__

Resolve = Callable[[str, int], Awaitable[list[str]]]
"""The addresses of a host."""

_AT_ONCE = 16
_MOST_WAITING = 64
_REDIRECTS = (301, 302, 303, 307, 308)
_HEADERS = [
    (b"User-Agent", f"millrace/{__version__}".encode()),
    (b"Accept", b"image/*"),
    (b"Accept-Encoding", b"identity"),
    (b"Connection", b"close"),
]


class Fetcher:
    """Fetches pictures on the event loop; `allows` says of an address whether it may be asked."""

    def __init__(
        self,
        limits: MediaLimits,
        *,
        allows: Callable[[str], bool] = is_public,
        resolve: Resolve | None = None,
    ) -> None:
        self._limits = limits
        # A look-up cannot be given up: threads of those that were must not be missed.
        self._names = ThreadPoolExecutor(2 * _AT_ONCE, thread_name_prefix="picture-names")
        self._network = _Guarded(resolve or self._look_up, allows)
        self._places = FairSemaphore(
            _AT_ONCE,
            per_caller=_AT_ONCE * 3 // 4,
            work="to have a picture fetched",
            waiting_per_caller=_MOST_WAITING,
            waiting=4 * _MOST_WAITING,
        )

    @functools.cached_property
    def _secure(self) -> ssl.SSLContext:
        return httpcore.default_ssl_context()

    def close(self) -> None:
        self._names.shutdown(wait=False, cancel_futures=True)

    async def fetch(self, url: Url) -> bytes:
        async with self._places.place():
            return await self._fetched(url)

    async def _fetched(self, url: Url) -> bytes:
        try:
            async with asyncio.timeout(self._limits.fetch_seconds):
                return await self._followed(url)
        except TimeoutError:
            raise BadPicture(
                f"The picture at {_shown(url)} did not come within "
                f"{self._limits.fetch_seconds:g} seconds."
            ) from None
        except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException) as error:
            raise BadPicture(
                f"The picture at {_shown(url)} could not be fetched ({type(error).__name__})."
            ) from error

    async def _followed(self, url: Url) -> bytes:
        at = url
        for _ in range(self._limits.redirects + 1):
            found = await self._asked(at)
            if isinstance(found, bytes):
                return found
            at = found
        raise BadPicture(
            f"The picture's address {_shown(url)} leads on more than {self._limits.redirects} times."
        )

    async def _asked(self, url: Url) -> bytes | Url:
        """The picture, or where it is said to be instead."""
        async with httpcore.AsyncConnectionPool(
            ssl_context=self._secure, max_connections=1, network_backend=self._network
        ) as pool:
            seconds = self._limits.fetch_seconds
            waits = {"connect": seconds, "read": seconds, "write": seconds, "pool": seconds}
            async with pool.stream(
                "GET", url.text, headers=_HEADERS, extensions={"timeout": waits}
            ) as response:
                headers = {name.lower(): value for name, value in response.headers}
                if response.status in _REDIRECTS:
                    return _next(url, headers.get(b"location"))
                if response.status != 200:
                    raise BadPicture(
                        f"The picture at {_shown(url)} was answered with status {response.status}."
                    )
                if headers.get(b"content-encoding", b"identity").lower() != b"identity":
                    raise BadPicture(f"The picture at {_shown(url)} came packed, unasked.")
                return await self._body(url, response, headers.get(b"content-length", b""))

    async def _body(self, url: Url, response: httpcore.Response, length: bytes) -> bytes:
        most = self._limits.most_bytes
        large = BadPicture(f"The picture at {_shown(url)} is larger than {format_bytes(most)}.")
        if length.isdigit() and int(length[:20]) > most:
            raise large
        data = bytearray()
        async for chunk in response.aiter_stream():
            data += chunk
            if len(data) > most:
                raise large
        if not data:
            raise BadPicture(f"The picture at {_shown(url)} is empty.")
        return bytes(data)

    async def _look_up(self, host: str, port: int) -> list[str]:
        # Names have threads of their own: a slow answer must not hold up other work.
        loop = asyncio.get_running_loop()
        kind = socket.SOCK_STREAM
        try:
            found = await loop.run_in_executor(
                self._names, lambda: socket.getaddrinfo(host, port, type=kind)
            )
        except (OSError, UnicodeError) as error:
            raise httpcore.ConnectError(str(error)) from error
        return list(dict.fromkeys(str(entry[4][0]) for entry in found))


class _Guarded(httpcore.AsyncNetworkBackend):
    """Connects to addresses that were checked, and to nothing else."""

    def __init__(self, resolve: Resolve, allows: Callable[[str], bool]) -> None:
        self._resolve = resolve
        self._allows = allows
        self._plain = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        addresses = await self._resolve(host, port)
        # One that is not public among others is how a name is made to change its answer.
        if not addresses or not all(map(self._allows, addresses)):
            raise BadPicture(f"The host '{host}' is not on the public internet; nothing was asked.")
        failed: Exception | None = None
        for address in addresses[:2]:
            try:
                return await self._plain.connect_tcp(address, port, timeout)
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                failed = error
        raise failed or httpcore.ConnectError("no address")

    async def connect_unix_socket(
        self,
        path: str,
        timeout: float | None = None,  # noqa: ASYNC109
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        raise BadPicture("Pictures are not fetched from sockets.")

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


def _next(url: Url, location: bytes | None) -> Url:
    if not location:
        raise BadPicture(f"The picture at {_shown(url)} is said to be elsewhere, but not where.")
    try:
        joined = urljoin(url.text, location.decode("latin-1"))
    except ValueError as error:
        raise BadPicture(f"The picture at {_shown(url)} leads to no address: {error}.") from error
    return url_of(joined)


def _shown(url: Url) -> str:
    """An address as errors name it: without what follows the host, which may be secret."""
    return f"{url.scheme}://{url.host}"
