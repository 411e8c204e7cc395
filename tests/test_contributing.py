"""CONTRIBUTING.md, CHANGELOG.md and the workflows name files, names and make targets that there are."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from millrace.version import __version__

ROOT = Path(__file__).resolve().parents[1]
GUIDE = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
CHANGES = (ROOT / "CHANGELOG.md").read_text("utf-8")
MAKEFILE = (ROOT / "Makefile").read_text("utf-8")
PROSE = " ".join(re.sub(r"```.*?```", "", GUIDE, flags=re.DOTALL).split())
SPANS = set(re.findall(r"`([^`]+)`", PROSE))
TARGETS = set(re.findall(r"^([a-z][a-z-]*):", MAKEFILE, re.MULTILINE))
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PLACEHOLDERS = re.compile(r"NAME|FOLDER|\*|[A-Z]-")
MADE = {"packaging/base-image.txt"}
"""What a make target writes and a release commits."""


def _paths() -> set[str]:
    """Words of code spans that are paths of this repository."""
    words = {word for span in SPANS for word in span.split() if not PLACEHOLDERS.search(word)}
    roots = {path.name for path in ROOT.iterdir() if path.name != ".venv"}
    found = {word for word in words if word.partition("/")[0] in roots}
    return found | {word for word in words if re.fullmatch(r"[\w./-]+/[\w.-]+\.py", word)}


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "CHANGELOG.md"])
def test_every_link_leads_somewhere(name: str) -> None:
    text = (ROOT / name).read_text("utf-8")
    links = set(re.findall(r"\]\(([^)]+)\)", text))
    assert links
    for link in links:
        file, _, anchor = link.partition("#")
        target = ROOT / (file or name)
        assert target.exists(), link
        headings = re.findall(r"^#+ (.+)$", target.read_text("utf-8"), re.MULTILINE)
        assert not anchor or anchor in map(_anchor, headings), link


def test_every_path_is_there() -> None:
    paths = _paths()
    assert len(paths) > 80
    assert {path for path in paths - MADE if not (ROOT / path).exists()} == set()


def test_every_name_is_in_the_file_that_it_is_said_to_be_in() -> None:
    said = re.findall(r"((?:`\w+`(?:, | and )?)+) (?:in|of) `([\w/.]+\.(?:py|toml))`", PROSE)
    said += re.findall(r"((?:`\w+`(?:, | and )?)+) \(`([\w/.]+\.py)`\)", PROSE)
    assert len(said) > 25
    for names, file in said:
        text = (ROOT / file).read_text("utf-8")
        for name in re.findall(r"\w+", names):
            assert re.search(rf"\b{name}\b", text), f"there is no {name} in {file}"


def test_the_table_of_targets_is_that_of_the_makefile() -> None:
    told = set(re.findall(r"^\| `make ([a-z-]+)`", GUIDE, re.MULTILINE))
    described = set(re.findall(r"^([a-z][a-z-]*):.*##", MAKEFILE, re.MULTILINE))
    assert told | {"help"} == described
    assert set(re.findall(r"make ([a-z-]+)`", " ".join(SPANS) + "`")) <= TARGETS


def test_the_drawing_has_the_layers_of_the_import_contract() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = [layer.replace("millrace.", "") for layer in contracts["contracts"][0]["layers"]]
    (drawing,) = re.findall(r"^```\n(.*?)```", GUIDE, re.MULTILINE | re.DOTALL)
    drawn = re.findall(r"^[│▼]  (.+?)(?:  .*)?$", drawing, re.MULTILINE)
    assert drawn == layers


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_call_targets_that_there_are(workflow: Path) -> None:
    text = workflow.read_text("utf-8")
    called = set(re.findall(r"run: make ([a-z-]+)$", text, re.MULTILINE))
    assert called and called <= TARGETS
    uses = re.findall(r"uses: (\S+)", text)
    assert uses and all(re.fullmatch(r"actions/[a-z-]+@v\d+", use) for use in uses)
    assert f"`.github/workflows/{workflow.name}`" in GUIDE


def test_the_changelog_has_this_version() -> None:
    (first, *_) = re.findall(r"^## (\S+)", CHANGES, re.MULTILINE)
    assert first == __version__
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == __version__
