"""The agents' programs: installed once by npm into the user's cache, at the pinned versions."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from pathlib import Path

import filelock
import pytest

from millrace.config import home

_PINS = Path(__file__).with_name("package.json")


def installed() -> Path:
    """The folder with node_modules; skips the test where it cannot be had."""
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        pytest.skip("npm and node are not on PATH")
    version = hashlib.sha256(_PINS.read_bytes()).hexdigest()[:12]
    folder = home() / "agents" / version
    folder.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(str(folder) + ".lock"):
        if not (folder / "installed").exists():
            shutil.copy(_PINS, folder)
            # No scripts: the programs are run from where npm puts them.
            flags = ["--ignore-scripts", "--no-audit", "--no-fund", "--fetch-retries=1"]
            command = [npm, "install", *flags]
            run = subprocess.run(command, cwd=folder, capture_output=True, text=True)
            if run.returncode:
                pytest.skip(f"npm cannot install the agents: {run.stderr[-400:]}")
            (folder / "installed").touch()
    return folder / "node_modules"


def program(pattern: str) -> Path:
    """The program for this platform; packages for the others are not installed."""
    found = sorted(installed().glob(pattern))
    if not found:
        pytest.skip(f"this agent has no build for this platform ({pattern})")
    return found[0]
