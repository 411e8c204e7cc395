"""Keeps an engine at its first line while a test's gate is closed (`conftest.Gate`).

Python imports a module of this name at every start; nothing but an engine takes notice here.
"""

from __future__ import annotations

import os
import sys
import time

closed = os.environ.get("MILLRACE_TEST_GATE")
if closed and "millrace.engine" in sys.orig_argv:
    while os.path.exists(closed):
        time.sleep(0.01)
