"""Workers and the gateway before them, which lives in an environment of its own (`make test-gateway`)."""

from __future__ import annotations

import os
import subprocess
import sysconfig
from pathlib import Path

import pytest
from conftest import PYTHON, ROOT

from smg_gateway import harmony

collect_ignore_glob = [] if "MILLRACE_GATEWAY" in os.environ else ["test_*.py"]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scripted model (script.py)."""
    made = tmp_path_factory.mktemp("gateway") / "script"
    _write("script.py", str(made))
    return made


@pytest.fixture(scope="session")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the vocabulary that the gateway writes channels in."""
    lines = harmony.vocabulary(Path(sysconfig.get_path("platlib"), "smg"))
    if lines is None:
        pytest.skip("this gateway does not carry the vocabulary")
    place = tmp_path_factory.mktemp("gateway") / "encodings"
    place.mkdir()
    (place / "o200k_base.tiktoken").write_bytes(lines)
    return place


@pytest.fixture(scope="session")
def channels(tmp_path_factory: pytest.TempPathFactory, vocabulary: Path) -> Path:
    """The model that speaks in channels (harmony.py)."""
    made = tmp_path_factory.mktemp("gateway") / "channels"
    _write("harmony.py", str(made), str(vocabulary / "o200k_base.tiktoken"))
    return made / "gpt-oss"


def _write(program: str, *args: str) -> None:
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    subprocess.run(
        [PYTHON, str(Path(__file__).with_name(program)), *args],
        check=True,
        env=os.environ | {"PYTHONPATH": paths},
    )
