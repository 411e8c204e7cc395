"""Leaves one back-end of MLX in an environment on Linux: `python packaging/backend.py cpu|cuda12|cuda13`.

MLX's CPU and CUDA packages bring the same library, mlx/lib/libmlx.so, and whichever was installed last is
used. Run by the environment's own Python, this removes the CUDA packages that are not wanted, and puts the
wanted library back where another lies over it.
"""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata

PACKAGES = {"cpu": "mlx-cpu", "cuda12": "mlx-cuda-12", "cuda13": "mlx-cuda-13"}
LIBRARY = "mlx/lib/libmlx.so"


def installed(package: str) -> metadata.Distribution | None:
    try:
        return metadata.distribution(package)
    except metadata.PackageNotFoundError:
        return None


def in_place(package: metadata.Distribution) -> bool:
    """Whether the library that is there is the one this package brought."""
    for file in package.files or ():
        if str(file) == LIBRARY:
            path = package.locate_file(file)
            try:
                return path.stat().st_size == file.size
            except FileNotFoundError:
                return False
    return False


def pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "-q", *arguments], check=True)


def settle(backend: str) -> None:
    wanted = PACKAGES[backend]
    others = [p for name, p in PACKAGES.items() if name not in (backend, "cpu") and installed(p)]
    if others:
        pip("uninstall", "-y", *others)
    found = installed(wanted)
    if found is None:
        sys.exit(f"{wanted} is not installed here")
    if not in_place(found):
        pip("install", "--force-reinstall", "--no-deps", f"{wanted}=={found.version}")


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in PACKAGES:
        sys.exit(f"usage: backend.py {'|'.join(PACKAGES)}")
    settle(sys.argv[1])
