"""Workers and the gateway before them, which lives in an environment of its own (`make test-gateway`)."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from conftest import PYTHON, ROOT

collect_ignore_glob = [] if "MILLRACE_GATEWAY" in os.environ else ["test_*.py"]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scripted model (script.py)."""
    made = tmp_path_factory.mktemp("gateway") / "script"
    program = Path(__file__).with_name("script.py")
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    subprocess.run(
        [PYTHON, str(program), str(made)], check=True, env=os.environ | {"PYTHONPATH": paths}
    )
    return made
