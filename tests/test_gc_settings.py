"""What is there when a server has started is no longer searched; what comes is."""

from __future__ import annotations

import subprocess
import sys

_CODE = """
import gc, weakref
from millrace import gc_settings

class Ring:
    def __init__(self):
        self.me = self

for _ in range(3):
    before = Ring()
    gc_settings.settle()
    assert gc.get_freeze_count() > 1000
    assert all(o is not before for o in gc.get_objects()), "nobody looks at it any more"
    ring = Ring()
    gone = weakref.ref(ring)
    del ring
    gc.collect()
    assert gone() is None, "what came since is found"

kept, full = [], []
gc.callbacks.append(lambda phase, info: full.append(info) if info["generation"] == 2 else None)
while len(kept) < 60_000:
    kept.append([])
assert not full, "a crowd brings no search of everything"
ring = Ring()
collected = []
# Asking a weakref here would hold the ring while it is asked: Python 3.12 and later collect at just that
# point of the loop.
weakref.finalize(ring, collected.append, True)
for _ in range(3):
    kept += [[] for _ in range(8_000)]  # it is old now
del ring
while not collected and len(kept) < 3_000_000:
    kept.append([])
assert collected, "and some time there is one"
"""


def test_only_what_comes_is_searched() -> None:
    ended = subprocess.run([sys.executable, "-c", _CODE], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
