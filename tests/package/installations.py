"""Installing millrace as users do, each way into a folder of its own, and running what was installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CONSTRAINTS = ROOT / "constraints.txt"
_PARTS = ("pyproject.toml", "README.md", "LICENSE", "constraints.txt", "millrace", "packaging")


@dataclass(frozen=True)
class Installed:
    """A `millrace` command, and a folder in which nothing is."""

    command: Path
    place: Path
    variables: dict[str, str] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        """Without what the tests' own environment would add, and without `millrace` on the PATH."""
        own = str(Path(sys.executable).parent)
        paths = [p for p in os.environ["PATH"].split(os.pathsep) if p != own]
        kept = {n: v for n, v in os.environ.items() if n not in ("PYTHONPATH", "VIRTUAL_ENV")}
        home = str(self.place / "home")
        return kept | {"PATH": os.pathsep.join(paths), "MILLRACE_HOME": home} | self.variables

    @property
    def empty(self) -> Path:
        folder = self.place / "empty"
        folder.mkdir(exist_ok=True)
        return folder

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(self.command), *arguments],
            cwd=self.empty,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=300,
        )


def checkout(place: Path, name: str = "checkout") -> Path:
    """A copy of what a build reads, so that it leaves nothing in the tree."""
    folder = place / name
    folder.mkdir(parents=True)
    for name in _PARTS:
        if (ROOT / name).is_dir():
            left_out = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, folder / name, ignore=left_out)
        else:
            shutil.copy(ROOT / name, folder / name)
    return folder


def environment(place: Path, *packages: str) -> Path:
    """A virtual environment with these in it; returns its programs' folder."""
    venv.create(place, with_pip=True)
    run(
        place / "bin" / "python",
        "-m",
        "pip",
        "install",
        "-q",
        "--disable-pip-version-check",
        *packages,
    )
    return place / "bin"


def run(*command: str | Path, **variables: str) -> str:
    """What a command says that ends well."""
    done = subprocess.run(
        [str(part) for part in command],
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, f"{command}: {done.stdout[-4000:]}"
    return done.stdout


def by_pip(place: Path, source: Path) -> Installed:
    programs = environment(place / "environment", "-c", str(CONSTRAINTS), str(source))
    return Installed(programs / "millrace", place)


def by_pipx(place: Path, source: Path) -> Installed:
    pipx = environment(place / "pipx", "pipx") / "pipx"
    programs = place / "bin"
    variables = {"PIPX_HOME": str(place / "tools"), "PIPX_BIN_DIR": str(programs)}
    run(pipx, "install", "--python", sys.executable, str(source), **variables)
    return Installed(programs / "millrace", place)


def uv(place: Path) -> Path:
    return environment(place / "uv", "uv") / "uv"


def by_uv(place: Path, source: Path) -> Installed:
    programs = place / "bin"
    variables = {"UV_TOOL_DIR": str(place / "tools"), "UV_TOOL_BIN_DIR": str(programs)}
    run(uv(place), "tool", "install", "--python", sys.executable, str(source), **variables)
    return Installed(programs / "millrace", place)


def by_docker_steps(place: Path, source: Path) -> Installed:
    steps = source / "packaging" / "docker-steps.sh"
    run("sh", steps, source, place / "opt", "cpu")
    return Installed(place / "opt" / "bin" / "millrace", place)
