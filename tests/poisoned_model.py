"""A tiny llama that dies as it is told to: copied into a model folder and loaded as its `model_file`.

Some tokens are orders. Whoever runs one, in a prompt or because it was generated, ends the process.
While there is a file of the folder's name with `.hold`, long rows wait.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models import llama

ABORT, KILL, EXIT = 49151, 49150, 49149
LONG = 100
HOLD = Path(__file__).parent.with_suffix(".hold")

ModelArgs = llama.ModelArgs


class Model(llama.Model):  # type: ignore[misc]
    def __call__(self, inputs: mx.array, cache: Any = None, **more: Any) -> mx.array:
        seen = set(np.array(inputs).ravel().tolist())
        if ABORT in seen:
            os.abort()
        if KILL in seen:
            os.kill(os.getpid(), signal.SIGKILL)
        if EXIT in seen:
            os._exit(7)
        while cache is not None and np.max(np.array(cache[0].offset)) > LONG and HOLD.exists():
            time.sleep(0.01)
        return super().__call__(inputs, cache=cache, **more)
