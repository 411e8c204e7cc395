"""`pip install -e .` of a clone named `millrace`: the import works inside it, beside it and elsewhere."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
from installations import checkout, run

_BUILD = "import sys; from setuptools.build_meta import build_editable; build_editable(sys.argv[1])"


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkout(tmp_path_factory.mktemp("parent"), "millrace")


@pytest.fixture(scope="module")
def python(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment into which the clone is installed as pip does it: build the wheel and unpack it."""
    place = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-c", _BUILD, str(place)], cwd=clone, check=True, timeout=120)
    (wheel,) = place.glob("*.whl")
    venv.create(place / "env", with_pip=False)
    found = place / "env" / "bin" / "python"
    site = Path(run(found, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    zipfile.ZipFile(wheel).extractall(site)
    # The dependencies are those of the tests; .pth files of a folder that is added so are not read.
    others = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (site / "dependencies.pth").write_text("\n".join(sorted(others)) + "\n")
    return found


@pytest.mark.parametrize("where", ["inside", "parent", "elsewhere"])
def test_the_package_is_imported_from_every_folder(
    where: str, clone: Path, python: Path, tmp_path: Path
) -> None:
    folder = {"inside": clone, "parent": clone.parent, "elsewhere": tmp_path}[where]
    kept = {n: v for n, v in os.environ.items() if n != "PYTHONPATH"}
    ways = {
        "LLM": ["-c", "from millrace import LLM; print(LLM.__name__)"],
        "Usage: ": ["-m", "millrace", "--help"],
    }
    for said, way in ways.items():
        done = subprocess.run(
            [str(python), *way], cwd=folder, env=kept, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0 and said in done.stdout, done
