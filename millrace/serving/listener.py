"""The listening socket, bound before anything costly starts: a port in use is told at once."""

from __future__ import annotations

import errno
import socket

from millrace.errors import SetupError
from millrace.servers import running

_ADVICE = {
    errno.EADDRINUSE: "Another program listens there: end it, or choose another port with --port.",
    errno.EACCES: "Ports below 1024 are the system's: choose another with --port.",
}


def bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Only where TCP is named does asyncio switch off Nagle's algorithm, which holds small writes back
    # for as long as a client delays its acknowledgements: 40 ms a request, and tokens in clumps.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE and (other := _server_at(port)) is not None:
            raise SetupError(
                f"Cannot listen on {host}:{port}: a millrace server{other} listens there. Choose another "
                f"port with --port, or end that server with millrace stop --port {port}."
            ) from error
        advice = _ADVICE.get(error.errno or 0, "Choose an address of this machine with --host.")
        raise SetupError(f"Cannot listen on {host}:{port}: {error.strerror}. {advice}") from error
    return listener


def _server_at(port: int) -> str | None:
    """The millrace server at a port of this machine, as a message names it."""
    record = next((r for r in running() if r.port == port), None)
    if record is None:
        return None
    return f" ({f'{record.name}, ' if record.name else ''}process {record.pid})"
