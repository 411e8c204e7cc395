"""`millrace doctor`: what millrace runs on here, one measurement, and what to do about faults.

MLX is used in a child process only, so that its crash is a finding and not the end of doctor.
"""

from __future__ import annotations

import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from millrace.config import home
from millrace.errors import MillraceError
from millrace.sizes import format_bytes

if TYPE_CHECKING:
    from rich.table import Table

    from millrace.models.device import DeviceProbe

PORT = 8000
GIB = 1024**3

_SLOW_GFLOPS = 5.0
_LOW_DISK = 2 * GIB
_WEIGHTS = {
    "packed": "as stored, by our own kernels",
    "f32": "float32",
    "keep": "as stored",
    "bf16": "bfloat16",
}
_INSTALL_MLX = (
    "pip install --force-reinstall millrace-server, or 'millrace-server[cuda13]' for an NVIDIA GPU"
)


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Everything doctor found. Problems keep millrace from running well; notes do not."""

    platform: str
    versions: dict[str, str]
    backend: str
    probe: DeviceProbe | None
    home: str
    disk_free: int | None
    default_model: str | None
    port: str
    problems: list[str]
    notes: list[str]


def register(app: typer.Typer) -> None:
    app.command()(doctor)


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    hostfile: Annotated[
        str | None,
        typer.Option(
            help="Look at the ranks that this file names instead: `millrace worker` runs there."
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="With --hostfile, a model that every rank should have.")
    ] = None,
) -> None:
    """Say what millrace runs on here, measure it, and name what is wrong."""
    if hostfile is not None:
        from millrace.cli.doctor_ranks import look

        if not look(hostfile, model, as_json=as_json):
            raise typer.Exit(1)
        return
    if as_json:
        report = examine()
        text = msgspec.json.format(msgspec.json.encode(report), indent=2).decode()
        typer.echo(text)
    else:
        report = _examine_and_show()
    if report.problems:
        raise typer.Exit(1)


def examine() -> Report:
    """Look at the machine, the installation and the folders."""
    from millrace import __version__
    from millrace.models.blas import mlx_backend, overlaid_cuda
    from millrace.models.device import versions

    backend = mlx_backend()
    found = versions()
    problems: list[str] = []
    notes: list[str] = []
    probe = None
    if backend == "missing":
        problems.append(f"MLX is not installed: {_INSTALL_MLX}.")
    else:
        probe, fault = run_probe()
        problems += [fault] if fault else []
    if probe is not None:
        problems += probe_problems(probe, backend)
    if (overlaid := overlaid_cuda()) is not None:
        problems.append(
            f"{overlaid} is installed, but another package's libmlx.so lies over its own, so the GPU "
            f"is not used: pip install --force-reinstall --no-deps {overlaid}=={found['mlx']}."
        )
    elif backend == "cpu" and Path("/proc/driver/nvidia/version").exists():
        notes.append(
            "There is an NVIDIA GPU here, and MLX is its CPU build. To use the GPU: "
            "make serve BACKEND=cuda13, or pip install 'millrace-server[cuda13]'."
        )
    disk, fault = disk_free(home())
    problems += [fault] if fault else []
    model = _default_model()
    if model is None:
        notes.append("The default model is not here yet; millrace serve or millrace pull gets it.")
    port, fault = port_state(PORT)
    problems += [fault] if fault else []
    return Report(
        platform=f"{platform.system()} {platform.release()} {platform.machine()}",
        versions={"millrace": __version__} | found,
        backend=backend,
        probe=probe,
        home=str(home()),
        disk_free=disk,
        default_model=model,
        port=port,
        problems=problems,
        notes=notes,
    )


def run_probe(
    command: tuple[str, ...] = (sys.executable, "-m", "millrace.models.device"),
    timeout: float = 180.0,
) -> tuple[DeviceProbe | None, str | None]:
    """What a process that uses MLX says, or why it could not say it."""
    from millrace.models.device import DeviceProbe

    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return None, (
            f"MLX did not finish one matrix product within {timeout:.0f} seconds. "
            f"Is the machine overloaded, or its GPU driver stuck?"
        )
    if done.returncode < 0:
        try:
            name = signal.Signals(-done.returncode).name
        except ValueError:
            name = f"signal {-done.returncode}"
        return None, f"MLX crashed ({name}). Install it again: {_INSTALL_MLX}.{_last(done.stderr)}"
    if done.returncode:
        return (
            None,
            f"MLX does not work here.{_last(done.stderr)} Install it again: {_INSTALL_MLX}.",
        )
    try:
        return msgspec.json.decode(done.stdout.splitlines()[-1], type=DeviceProbe), None
    except (msgspec.MsgspecError, IndexError):
        return None, f"The probe of MLX gave no report.{_last(done.stderr)}"


def probe_problems(probe: DeviceProbe, backend: str) -> list[str]:
    """What is wrong with how MLX runs here."""
    found = []
    device, blas = probe.device, probe.blas
    if backend == "cuda" and device.kind == "cpu":
        found.append(
            "MLX has its CUDA back-end but sees no GPU. Check that nvidia-smi lists one, "
            "and that the driver is new enough for this CUDA version."
        )
    if device.kind == "cpu" and probe.kernels is None:
        found.append(
            "llvmlite is missing, so models run in float32, several times slower and larger: "
            "pip install llvmlite."
        )
    if blas.problem:
        found.append(blas.problem)
    elif device.kind == "cpu" and not blas.fast:
        found.append(
            f"MLX uses its reference BLAS, about 30 times slower than OpenBLAS: {blas.detail}. "
            f"Unset MILLRACE_BLAS to let millrace load a fast one."
        )
    elif device.kind == "cpu" and probe.gflops < _SLOW_GFLOPS:
        found.append(
            f"One matrix product ran at {probe.gflops:.1f} GFLOP/s, though {blas.kind} is loaded. "
            f"Other programs may be using the CPU, or OPENBLAS_NUM_THREADS is too low."
        )
    return found


def disk_free(folder: Path) -> tuple[int | None, str | None]:
    """Free bytes where models are kept, and what is wrong with the place."""
    existing = next((p for p in (folder, *folder.parents) if os.path.exists(p)), folder)
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        why = "cannot be written" if existing.is_dir() else "is not a folder"
        return (
            None,
            f"Nothing can be kept in {folder}: {existing} {why}. Set MILLRACE_HOME to another.",
        )
    try:
        free = shutil.disk_usage(existing).free
    except OSError as error:
        return None, f"{folder} cannot be used: {error}. Choose another with MILLRACE_HOME."
    if free < _LOW_DISK:
        return free, (
            f"Only {format_bytes(free)} are free for models in {folder}. "
            f"Make room, or choose another place with MILLRACE_HOME."
        )
    return free, None


def port_state(port: int) -> tuple[str, str | None]:
    """Whether `millrace serve` could listen there: free, taken by a millrace, or by another."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
            return "free", None
        except OSError:
            pass
    if status := _health(port):
        return f"a server answers there ({status})", None
    return "in use", f"Port {port} is taken by another program; use millrace serve --port 9000."


def _health(port: int) -> str | None:
    import http.client

    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=1)
    try:
        connection.request("GET", "/health")
        body = msgspec.json.decode(connection.getresponse().read(65536))
    except (OSError, http.client.HTTPException, msgspec.MsgspecError):
        return None
    finally:
        connection.close()
    status = body.get("status") if isinstance(body, dict) else None
    return status if isinstance(status, str) else None


def _default_model() -> str | None:
    from millrace.models.resolve import resolve

    try:
        return str(resolve(None, download=False).path)
    except MillraceError:
        return None


def _last(stderr: str) -> str:
    lines = stderr.strip().splitlines()
    return f" It said: {lines[-1].strip()[:300]}" if lines else ""


def _examine_and_show() -> Report:
    from rich.console import Console
    from rich.markup import escape

    console = Console(highlight=False)
    with console.status("Trying MLX in a process of its own"):
        report = examine()
    console.print(_table(report))
    for note in report.notes:
        console.print(f"[cyan]note:[/] {escape(note)}", soft_wrap=True)
    for problem in report.problems:
        console.print(f"[bold red]problem:[/] {escape(problem)}", soft_wrap=True)
    if not report.problems:
        console.print("[bold green]All is well.[/]")
    return report


def _table(report: Report) -> Table:
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=box.SIMPLE, show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for label, value in rows(report):
        table.add_row(label, escape(value))
    return table


def _fitting(budget: int) -> str:
    """The best models that make text, and how to get the first."""
    from millrace.models.suggestions import choices

    found = choices(budget, frozenset({"chat", "code"}))[:4]
    if not found:
        return "tiny ones"
    names = ", ".join(f"{s.name} ({format_bytes(s.bytes)})" for s in found)
    return f"{names}; to have the first: millrace serve {found[0].name}"


def rows(report: Report) -> list[tuple[str, str]]:
    """The report as lines of label and value."""
    lines = [("platform", report.platform), ("MLX back-end", report.backend)]
    lines += list(report.versions.items())
    if (probe := report.probe) is not None:
        device, blas = probe.device, probe.blas
        memory = f"{format_bytes(device.memory)}, {format_bytes(device.budget)} of it for models"
        lines += [
            ("device", f"{device.kind}: {device.name}"),
            ("memory", memory),
            ("models that fit", _fitting(device.budget)),
            ("BLAS", " ".join(filter(None, (blas.kind, blas.detail and f"({blas.detail})")))),
            ("BLAS library", blas.path or "none"),
            ("weights (auto)", _WEIGHTS["packed" if probe.kernels else probe.weights]),
            (f"matmul {probe.dtype}", f"{probe.gflops:,.1f} GFLOP/s"),
        ]
        if (own := probe.kernels) is not None:
            rate = f"{own.weights / 1e9:,.1f} billion 4-bit weights a second"
            lines.append(("CPU kernels", f"{own.vectors} ({own.processor}), {rate}"))
    disk = "unknown" if report.disk_free is None else format_bytes(report.disk_free)
    return [
        *lines,
        ("home", report.home),
        ("free disk", disk),
        ("default model", report.default_model or "not here yet"),
        (f"port {PORT}", report.port),
    ]
