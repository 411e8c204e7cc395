"""How long messages take to a rank's worker, and how many bytes go there in a second."""

from __future__ import annotations

import statistics
import time

from millrace.distributed.handshake import Refused
from millrace.distributed.messages import VISIT, Echo, Measured, Probe, encoder, from_worker
from millrace.serving.ranks.link import Link, connect

_SMALL = 20
_LARGE = 8 << 20


async def measure(address: tuple[str, int], secret: str, rank: int) -> Measured:
    """The way to the worker of a rank; what keeps it from being measured is in the answer."""
    try:
        link = await connect(address, secret, VISIT, rank)
    except (OSError, Refused) as error:
        return Measured(rank, problem=str(error) or "it does not answer")
    try:
        await _timed(link, b"", echo=True)
        small = [await _timed(link, b"x", echo=True) for _ in range(_SMALL)]
        seconds = statistics.median(small)
        large = min([await _timed(link, bytes(_LARGE), echo=False) for _ in range(3)])
        return Measured(rank, seconds, _LARGE / max(1e-9, large - seconds / 2))
    except (OSError, Refused, ValueError) as error:
        return Measured(rank, problem=str(error) or "it hung up")
    finally:
        link.close()


async def _timed(link: Link, data: bytes, *, echo: bool) -> float:
    begin = time.perf_counter()
    link.send(encoder.encode(Probe(data, echo)))
    await link.drained()
    while True:
        answer = await link.receive()
        if answer is None:
            raise ConnectionError("it hung up")
        if isinstance(from_worker.decode(answer), Echo):
            return time.perf_counter() - begin
