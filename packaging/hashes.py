"""Writes packaging/hashes/*.txt, what a release is installed from: `make hashes`.

Each file names exact versions with the SHA-256 of all their files, for `pip install --require-hashes -r`.
The versions are those of constraints.txt, which must name every package that is needed on any platform
below. uv resolves, since pip evaluates markers for the machine it runs on only; the index is pip's.
"""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
CONSTRAINTS = ROOT / "constraints.txt"
FOLDER = ROOT / "packaging" / "hashes"
UV = "uv==0.13.8"
PYTHONS = ("3.11", "3.12", "3.13")
PLATFORMS = (("linux", "x86_64"), ("linux", "aarch64"), ("darwin", "arm64"))
SERVING = ("vision", "localai", "smg")
BESIDE = ("cuda12", "cuda13", "plot")
"""Extras with a file each, which is given to pip beside serve.txt."""
ALONE = {"vlm": "mlx-vlm", "build": "setuptools"}
"""Packages that are installed without what they depend on."""
_HASH = re.compile(r"--hash=(sha256:[0-9a-f]{64})")


@dataclass(frozen=True)
class Pin:
    name: str
    version: str
    marker: str
    """Empty where it is needed on all platforms."""
    hashes: tuple[str, ...]

    def __str__(self) -> str:
        marker = f" ; {self.marker}" if self.marker else ""
        return " \\\n".join(
            [f"{self.name}=={self.version}{marker}", *(f"    --hash={h}" for h in self.hashes)]
        )


def environments() -> Iterator[dict[str, str]]:
    """What markers are evaluated with, for each platform and each Python."""
    for (system, machine), python in itertools.product(PLATFORMS, PYTHONS):
        yield {
            "sys_platform": system,
            "platform_system": {"linux": "Linux", "darwin": "Darwin"}[system],
            "platform_machine": machine,
            "python_version": python,
            "python_full_version": f"{python}.0",
            "implementation_name": "cpython",
            "platform_python_implementation": "CPython",
            "os_name": "posix",
        }


def simplified(marker: Marker | None) -> str | None:
    """A marker that is as true on the platforms above; None if it never is."""
    found = list(environments())
    true = [marker is None or marker.evaluate(e) for e in found]
    if all(true):
        return ""
    if not any(true):
        return None
    for system in ("linux", "darwin"):
        if true == [e["sys_platform"] == system for e in found]:
            return f"sys_platform == '{system}'"
    return str(marker)


def pins_in(text: str) -> list[Pin]:
    """The requirements of a file in pip's form; raises ValueError where one is not pinned and hashed."""
    found = []
    for block in re.split(r"(?<!\\)\n", text):
        line = block.partition("--hash")[0].replace("\\\n", " ").strip()
        if not line or line.startswith(("#", "--")):
            continue
        requirement = Requirement(line)
        version = re.fullmatch(r"==([^*,]+)", str(requirement.specifier))
        hashes = _HASH.findall(block)
        if version is None or not hashes or requirement.url or requirement.extras:
            raise ValueError(f"not an exact version with hashes: {line}")
        if (marker := simplified(requirement.marker)) is not None:
            name = canonicalize_name(requirement.name)
            found.append(Pin(name, version[1], marker, tuple(sorted(set(hashes)))))
    return sorted(found, key=lambda pin: pin.name)


def constraints(text: str) -> dict[str, str]:
    pairs = (line.split("==") for line in text.splitlines() if line and not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in pairs}


def disagreements(pins: Iterable[Pin], wanted: dict[str, str]) -> list[str]:
    """Pins that constraints.txt does not have, as lines for it."""
    return [f"{p.name}=={p.version}" for p in pins if wanted.get(p.name) != p.version]


def written(title: str, pins: Iterable[Pin]) -> str:
    """A file for pip; no addresses are in it, so that each user's own index is asked."""
    head = f"# {title} Made by `make hashes`; not edited by hand.\n--only-binary :all:\n"
    return "\n".join([head, *map(str, pins)]) + "\n"


class Resolver:
    def __init__(self, place: Path) -> None:
        self._place = place
        venv.create(place / "uv", with_pip=True)
        python = place / "uv" / "bin" / "python"
        quiet = ("-q", "--disable-pip-version-check")
        subprocess.run([python, "-m", "pip", "install", *quiet, UV], check=True)
        self._uv = place / "uv" / "bin" / "uv"
        supported = " or ".join(
            f"(sys_platform == '{s}' and platform_machine == '{m}')" for s, m in PLATFORMS
        )
        wanted = f"[\"implementation_name == 'cpython' and ({supported})\"]"
        project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
        (place / "pyproject.toml").write_text(
            f"{project}\n[tool.uv]\nenvironments = {wanted}\n", encoding="utf-8"
        )

    def project(self, *extras: str) -> list[Pin]:
        """What the wheel needs with these extras."""
        return self._compiled("pyproject.toml", *(f"--extra={extra}" for extra in extras))

    def alone(self, package: str) -> list[Pin]:
        (self._place / "alone.in").write_text(f"{package}\n")
        return self._compiled("alone.in", "--no-deps")

    def _compiled(self, *arguments: str) -> list[Pin]:
        options = (
            *("--universal", "--python-version", PYTHONS[0], "--generate-hashes"),
            *("--only-binary", ":all:", "-c", str(CONSTRAINTS), "--system-certs"),
            *("--no-header", "--no-annotate", "-q"),
        )
        done = subprocess.run(
            [self._uv, "pip", "compile", *arguments, *options],
            cwd=self._place,
            env=os.environ | _index(),
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        return pins_in(done.stdout)


def _index() -> dict[str, str]:
    """Pip's own index and certificates, for uv. Other places with files are left out on purpose: their
    files may be other ones than the index has."""
    found = {"UV_DEFAULT_INDEX": _setting("index-url"), "SSL_CERT_FILE": _setting("cert")}
    return {name: value for name, value in found.items() if value}


def _setting(name: str) -> str:
    if given := os.environ.get(f"PIP_{name.upper().replace('-', '_')}"):
        return given
    asked = [sys.executable, "-m", "pip", "config", "get", f"global.{name}"]
    return subprocess.run(asked, capture_output=True, text=True).stdout.strip()


def made(resolver: Resolver) -> dict[str, list[Pin]]:
    """The pins of each file."""
    serve = resolver.project(*SERVING)
    found = {"serve": serve}
    for extra in BESIDE:
        found[extra] = [p for p in resolver.project(*SERVING, extra) if p not in serve]
    return found | {name: resolver.alone(package) for name, package in ALONE.items()}


TITLES = {
    "serve": "All that serving needs: pip install --require-hashes -r serve.txt.",
    "cuda12": "MLX's CUDA 12 back-end, after and beside serve.txt.",
    "cuda13": "MLX's CUDA 13 back-end, after and beside serve.txt.",
    "plot": "Plots of `millrace bench`, beside serve.txt.",
    "vlm": "Models that take pictures, after serve.txt and with --no-deps.",
    "build": "What builds the wheel from a checkout.",
}


def main() -> None:
    with tempfile.TemporaryDirectory() as place:
        files = made(Resolver(Path(place)))
    wanted = constraints(CONSTRAINTS.read_text())
    missing = {line for pins in files.values() for line in disagreements(pins, wanted)}
    if missing:
        sys.exit("constraints.txt must name these, too:\n" + "\n".join(sorted(missing)))
    FOLDER.mkdir(exist_ok=True)
    for name, pins in files.items():
        (FOLDER / f"{name}.txt").write_text(written(TITLES[name], pins))
        print(f"{name}.txt: {len(pins)} packages, {sum(len(p.hashes) for p in pins)} files")


if __name__ == "__main__":
    main()
