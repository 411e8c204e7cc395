"""The engine process: `python -m millrace.engine ADDRESS CONFIG RECORDER`, started by the front.

RECORDER is the number of an open file, in which the front watches the engine (millrace.flight).
Its standard input is a pipe from the front. When that closes, the front is gone, whatever way it
went, and the engine ends too.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from typing import NoReturn

from millrace import gc_settings
from millrace.engine.build import build
from millrace.engine.process import begin
from millrace.engine.transport import SocketTransport
from millrace.errors import MillraceError
from millrace.protocol import Failed, Loading

EXIT_CANNOT_START = 3


def main() -> None:
    address, raw, file = sys.argv[1:4]
    config, recorder = begin(raw, file)
    threading.Thread(target=_end_with_front, daemon=True).start()
    transport = SocketTransport(address)
    transport.send(Loading("starting"))
    try:
        engine = build(config, transport, recorder)
    except MillraceError as error:
        transport.send(Failed(error.code, error.message))
        transport.close()
        _end(EXIT_CANNOT_START)
    gc_settings.settle()
    engine.run()
    transport.close()
    _end(0)


def _end(status: int) -> NoReturn:
    """Threads of libraries may still run: taking the process apart under them can crash it."""
    logging.shutdown()
    os._exit(status)


def _end_with_front() -> None:
    while os.read(0, 4096):
        pass
    os._exit(0)


if __name__ == "__main__":
    main()
