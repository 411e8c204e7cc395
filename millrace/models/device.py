"""Facts about the device MLX computes on, and the settings MLX advises for it.

Only the engine process and `millrace doctor`'s probe use this: MLX is imported inside the
functions, after the BLAS is in place, and everything a back-end may lack is asked for first.
Run as a module it prints a `Probe` as JSON, so that another process can survive MLX's crash.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import msgspec

from millrace import descriptors, native
from millrace.models import blas
from millrace.protocol import DeviceMemory

Kind = Literal["cpu", "metal", "cuda"]
Dtype = Literal["float32", "float16", "bfloat16"]

MIB = 1024**2
GIB = 1024**3

_FREED_SHARE = 40
"""Freed buffers of a CPU engine may take this part of what it was given."""
_M_MMAP_THRESHOLD = -3
_LARGE_BUFFER = MIB // 4

_PACKAGES = ("mlx", "mlx-lm", "tokenizers")


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """The device, its memory in bytes, and how much of it models and caches may take."""

    kind: Kind
    name: str
    memory: int
    budget: int


class DeviceLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What `configure` asked of MLX, in bytes; None where the back-end has no such thing."""

    wired: int | None
    cache: int | None


class Kernels(msgspec.Struct, frozen=True):
    """Our own kernels for a CPU."""

    processor: str
    vectors: str
    weights: float
    """Four-bit weights a second, of a product with one row on all cores."""


class DeviceProbe(msgspec.Struct, frozen=True, kw_only=True):
    """All that doctor wants to hear from a process that really uses MLX."""

    device: Device
    blas: blas.Blas
    weights: str
    dtype: Dtype
    gflops: float
    kernels: Kernels | None = None
    """None where they cannot be used."""


_CUDA_CACHES = {
    # A plan per shape of attention and a graph per shape of step are worth keeping; by default MLX keeps
    # a few hundred and raises when it has had to drop as many again.
    "MLX_CUDA_SDPA_CACHE_SIZE": "4096",
    "MLX_CUDA_GRAPH_CACHE_SIZE": "4096",
    "MLX_ENABLE_CACHE_THRASHING_CHECK": "0",
}


def before_import() -> None:
    """What MLX reads from the environment when it is imported; what is set there already stays.

    And the limit of open files, which mlx-lm would set.
    """
    descriptors.hold()
    for name, value in _CUDA_CACHES.items():
        os.environ.setdefault(name, value)


def core() -> Any:
    """`mlx.core`, with the BLAS loaded before it."""
    before_import()
    blas.prepare()
    import mlx.core

    return mlx.core


def kind() -> Kind:
    """The back-end behind MLX's default device."""
    mx = core()
    if mx.default_device().type != mx.DeviceType.gpu:
        return "cpu"
    return "cuda" if _available(mx, "cuda") else "metal"


def describe() -> Device:
    """The default device as MLX and the operating system see it."""
    which, info = kind(), _info(core())
    name = str(info.get("device_name") or info.get("architecture") or which)
    if which == "cpu":
        memory = host_memory()
        name = f"{_cpu_name() or name}, {blas.usable_cores()} cores"
        return Device(kind=which, name=name, memory=memory, budget=memory * 4 // 5)
    memory = int(info.get("total_memory") or info.get("memory_size") or 0)
    advised = info.get("max_recommended_working_set_size")
    budget = int(advised) if advised else memory * 9 // 10
    return Device(kind=which, name=name, memory=memory, budget=budget)


def configure() -> DeviceLimits:
    """Set MLX's memory limits for a server: weights stay resident, freed buffers do not pile up.

    MLX advises to wire up to the recommended working set on Metal. Its cache of freed buffers is
    unbounded there and on CUDA, and so small on the CPU that a prefill allocates anew each time.
    """
    mx, device = core(), describe()
    wired = None
    if device.kind == "metal" and device.budget > 0 and hasattr(mx, "set_wired_limit"):
        wired = _try_wire(mx, device.budget)
    cache = cache_limit(device)
    if not hasattr(mx, "set_cache_limit"):
        return DeviceLimits(wired=wired, cache=None)
    mx.set_cache_limit(cache)
    return DeviceLimits(wired=wired, cache=cache)


def cache_limit(device: Device) -> int:
    """How many bytes of freed buffers MLX may keep for reuse."""
    if device.kind == "cpu":
        return min(256 * MIB, device.budget // 8)
    return max(min(8 * GIB, device.budget // 8), min(256 * MIB, device.budget // 2))


def bound_freed(given: int) -> None:
    """Keep freed buffers small beside the bytes that weights, state and cache were given.

    Elsewhere than on a CPU an allocation is dear, and the memory is the card's own.
    """
    mx, device = core(), describe()
    bound = given // _FREED_SHARE
    if device.kind == "cpu" and bound < cache_limit(device) and hasattr(mx, "set_cache_limit"):
        mx.set_cache_limit(bound)
        _return_large_buffers()


def measure_matmul(dtype: Dtype = "float32", *, seconds: float = 0.5) -> float:
    """The best of several square products, in GFLOP/s."""
    mx = core()
    size = 1024 if kind() == "cpu" else 4096
    a, b = (mx.random.normal((size, size)).astype(getattr(mx, dtype)) for _ in range(2))
    mx.eval(a, b, a @ b)
    best, end = float("inf"), time.perf_counter() + seconds
    while True:
        start = time.perf_counter()
        mx.eval(a @ b)
        now = time.perf_counter()
        best = min(best, now - start)
        if now > end:
            return float(2 * size**3 / best / 1e9)


def versions() -> dict[str, str]:
    """The versions in force: Python, and each package or "missing"."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "missing"
    return found


def memory_now() -> DeviceMemory:
    mx = core()
    return DeviceMemory(mx.get_active_memory(), mx.get_peak_memory(), mx.get_cache_memory())


def host_memory() -> int:
    """Bytes of RAM this process may use: the machine's, cut by a container's limit."""
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        total = 0
    limits = [int(value) for value in blas.cgroup_values("memory.max") if value.isdigit()]
    return min([total, *limits]) if total > 0 else min(limits, default=0)


def probe() -> DeviceProbe:
    """Use MLX for real: import it and mlx-lm, ask for the device, measure one product."""
    device = describe()
    from millrace.models.placement import resolve_weights

    weights = resolve_weights("auto", device.kind)
    dtype: Dtype = "float32" if weights == "f32" else "bfloat16"
    return DeviceProbe(
        device=device,
        blas=blas.prepare(),
        weights=weights,
        dtype=dtype,
        gflops=measure_matmul(dtype),
        kernels=_kernels() if device.kind == "cpu" else None,
    )


def _kernels() -> Kernels | None:
    if native.missing() is not None:
        return None
    from millrace.native import rate

    return Kernels(rate.name(), rate.vectors(), rate.measure(blas.threads()))


def _info(mx: Any) -> dict[str, Any]:
    for holder in (mx, getattr(mx, "metal", None)):
        ask = getattr(holder, "device_info", None)
        if ask is None:
            continue
        try:
            return dict(ask())
        except (RuntimeError, ValueError):
            continue
    return {}


def _available(mx: Any, name: str) -> bool:
    module = getattr(mx, name, None)
    return bool(module is not None and module.is_available())


def _try_wire(mx: Any, size: int) -> int | None:
    try:
        mx.set_wired_limit(size)
    except (RuntimeError, ValueError):
        return None
    return size


def _return_large_buffers() -> None:
    """Have the C library give large buffers back to the system as soon as they are freed.

    glibc stops doing so once some have been freed, and then keeps holes between those still in use.
    """
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE_BUFFER)


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "")


if __name__ == "__main__":
    sys.stdout.write(msgspec.json.encode(probe()).decode())
