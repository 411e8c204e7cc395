"""What the proof ran on, in words that name no owner: system, device, memory, versions.

The device is told by a process that used MLX; nothing here imports it.
"""

from __future__ import annotations

import os
import platform

from millrace import __version__
from millrace.models.blas import mlx_backend, usable_cores
from millrace.models.description import describe
from millrace.models.device import DeviceProbe, host_memory, versions
from millrace.models.resolve import Resolved
from millrace.prove.report import cleaned
from millrace.prove.served import ServedState
from millrace.sizes import format_bytes

_BUSY = 0.3
_WIDER = 1.5


def machine(probe: DeviceProbe | None) -> dict[str, str]:
    """`probe` is None where MLX does not work: system and versions are what such a report is for."""
    found = versions()
    facts = {
        "system": cleaned(_system()),
        **_device(probe),
        "back-end": mlx_backend(),
        "millrace": __version__,
        "Python": found.pop("python"),
        **found,
    }
    if (load := busy()) is not None:
        cores = usable_cores()
        facts["busy"] = f"load {load:.1f} on {cores} cores in the minute before: speeds may be low"
    return facts


def _device(probe: DeviceProbe | None) -> dict[str, str]:
    ram = f"{format_bytes(host_memory())} RAM"
    if probe is None:
        return {"memory": ram}
    device, own = probe.device, probe.kernels
    return {
        "device": cleaned(f"{device.kind}: {device.name}"),
        "memory": f"{format_bytes(device.memory)} of the device, {ram}",
        "kernels": f"{own.vectors}, our own" if own else "MLX's",
        "BLAS": probe.blas.kind,
        f"matmul {probe.dtype}": f"{probe.gflops:,.0f} GFLOP/s",
    }


def busy() -> float | None:
    """The machine's load, where other work is running; ratios then swing by more than they show."""
    try:
        load = os.getloadavg()[0]
    except (AttributeError, OSError):
        return None
    return load if load > _BUSY * usable_cores() else None


def name_of(model: Resolved) -> str:
    """A model's public name; a folder or a file of the user's has none."""
    return model.name if model.source in ("default", "hub") else "a model of their own"


def shape_of(model: Resolved) -> str:
    found = describe(model.path)
    parts = [
        found.architecture,
        f"{found.parameters / 1e6:,.0f} million parameters",
        found.quantization or found.dtype,
        f"window {found.context:,}" if found.context else "",
    ]
    return ", ".join(filter(None, parts))


def fits_twice(model: Resolved, probe: DeviceProbe) -> bool:
    """Whether mlx-lm may load the model beside the server's engine."""
    found = describe(model.path)
    once = found.bytes
    beside = found.parameters * 4 if probe.device.kind == "cpu" else once
    return once + beside < 0.7 * probe.device.memory


def widened(model: Resolved, state: ServedState) -> str:
    """What the weights were widened to that the server holds: f32, bf16, or keep for nothing.

    A CPU's own kernels take them packed and compute in float32, which is what mlx-lm has then.
    """
    if state.device == "cpu":
        return "f32"
    if (state.weight_bytes or 0) < _WIDER * describe(model.path).bytes:
        return "keep"
    return "f32" if state.dtype == "float32" else "bf16"


def _system() -> str:
    mac = platform.mac_ver()[0]
    if mac:
        return f"macOS {mac} {platform.machine()}"
    return f"{platform.system()} {platform.release()} {platform.machine()}"
