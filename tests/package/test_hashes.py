"""The files that releases are installed from agree with constraints.txt and cover what the wheel needs."""

from __future__ import annotations

import importlib.util
import re
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
A, B = (f"sha256:{letter * 64}" for letter in "ab")


def _script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"{name}_script", ROOT / f"packaging/{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


hashes = _script("hashes")
FILES = ("serve", *hashes.BESIDE, *hashes.ALONE)
TEXTS = {name: (ROOT / f"packaging/hashes/{name}.txt").read_text() for name in FILES}
PINS: dict[str, list[Any]] = {name: hashes.pins_in(text) for name, text in TEXTS.items()}


@pytest.mark.parametrize("name", FILES)
def test_each_file_agrees_with_the_constraints_and_has_hashes(name: str) -> None:
    wanted = hashes.constraints((ROOT / "constraints.txt").read_text())
    assert PINS[name] and hashes.disagreements(PINS[name], wanted) == []
    lines = [line for line in TEXTS[name].splitlines() if line and not line.startswith(("#", "--"))]
    pinned = [line for line in lines if not line.startswith(" ")]
    assert len(pinned) == len(PINS[name]), "every requirement is read"
    assert all(
        re.fullmatch(r"    --hash=sha256:[0-9a-f]{64}( \\)?", x) for x in lines if x[0] == " "
    )
    assert TEXTS[name] == hashes.written(hashes.TITLES[name], PINS[name])
    names = [pin.name for pin in PINS[name]]
    assert names == sorted(set(names))


@pytest.mark.parametrize("name", FILES)
def test_no_file_names_a_place_to_download_from(name: str) -> None:
    assert "://" not in TEXTS[name] and "index" not in TEXTS[name]
    assert "--only-binary :all:" in TEXTS[name].splitlines()


def _needed(requirements: list[str], place: dict[str, str], extras: set[str]) -> list[Requirement]:
    found = map(Requirement, requirements)
    return [
        r
        for r in found
        if r.marker is None or any(r.marker.evaluate(place | {"extra": e}) for e in {"", *extras})
    ]


@pytest.mark.parametrize(
    "place", hashes.environments(), ids=lambda e: "-".join(map(str, e.values()))
)
@pytest.mark.parametrize("beside", [(), ("cuda12",), ("cuda13",), ("plot",)])
def test_all_that_the_wheel_needs_is_there_on_each_platform(
    place: dict[str, str], beside: tuple[str, ...]
) -> None:
    """As far as packages are installed here, whose own requirements can be read."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = {
        pin.name: pin.version
        for name in ("serve", *beside)
        for pin in PINS[name]
        if not pin.marker or Requirement(f"x ; {pin.marker}").marker.evaluate(place)  # type: ignore[union-attr]
    }
    asked = list(project["dependencies"])
    for extra in (*hashes.SERVING, *beside):
        asked += project["optional-dependencies"][extra]
    waiting, seen = _needed(asked, place, set()), set()
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        key = name, frozenset(requirement.extras)
        if key in seen:
            continue
        seen.add(key)
        assert name in listed, f"{requirement} is not in the files"
        assert requirement.specifier.contains(listed[name]), requirement
        try:
            found = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        if found.version == listed[name]:
            waiting += _needed(found.requires or [], place, set(requirement.extras))
    assert len(seen) > 50


def test_versions_are_read_with_their_markers_and_hashes() -> None:
    every = " or ".join(
        f"(platform_machine == '{m}' and sys_platform == '{s}')" for s, m in hashes.PLATFORMS
    )
    text = (
        f"One_Two==1.0 ; {every} \\\n    --hash={B} \\\n    --hash={A}\n"
        f"mac==2 ; sys_platform == 'darwin' and platform_machine == 'arm64' \\\n    --hash={A}\n"
        f"linux==3 ; platform_system == 'Linux' \\\n    --hash={A}\n"
        f"other==4 ; implementation_name == 'pypy' \\\n    --hash={A}\n"
        f"new==5 ; python_version >= '3.13' \\\n    --hash={A}\n"
    )
    found = {pin.name: pin for pin in hashes.pins_in(text)}
    assert set(found) == {"one-two", "mac", "linux", "new"}, "what no platform needs is left out"
    assert (found["one-two"].marker, found["one-two"].hashes) == ("", (A, B))
    assert found["mac"].marker == "sys_platform == 'darwin'"
    assert found["linux"].marker == "sys_platform == 'linux'"
    assert "3.13" in found["new"].marker
    assert hashes.pins_in(hashes.written("Title.", found.values())) == sorted(
        found.values(), key=lambda pin: pin.name
    )


@pytest.mark.parametrize(
    "line",
    [
        "a==1",
        f"a>=1 --hash={A}",
        f"a==1.* --hash={A}",
        f"a==1,!=2 --hash={A}",
        f"a[b]==1 --hash={A}",
        "a==1 --hash=md5:00",
        f"a @ https://files.example/a.whl --hash={A}",
    ],
)
def test_what_is_not_pinned_and_hashed_is_refused(line: str) -> None:
    with pytest.raises(ValueError):
        hashes.pins_in(line + "\n")


def test_a_package_that_the_constraints_lack_is_named() -> None:
    pins = [hashes.Pin("a", "1", "", (A,)), hashes.Pin("b-c", "2", "", (A,))]
    assert hashes.disagreements(pins, hashes.constraints("a==1\nB_c==2\n")) == []
    assert hashes.disagreements(pins, hashes.constraints("a==2\n")) == ["a==1", "b-c==2"]


def test_the_image_installs_nothing_without_a_hash() -> None:
    steps = (ROOT / "packaging/docker-steps.sh").read_text()
    installs = [line for line in steps.splitlines() if "pip install" in line]
    assert len(installs) >= 3
    assert all("--require-hashes" in line or "--no-index" in line for line in installs)
