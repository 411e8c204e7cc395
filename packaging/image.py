"""Builds the release image from a base image that is named by its digest.

`python packaging/image.py resolve` asks Docker which digest the base's tag has now, and records it in
packaging/base-image.txt. `python packaging/image.py build [BACKEND] [OPTIONS OF docker build]` builds from
that and refuses to without it. A tag can be moved to another image; a digest is the image.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCKERFILE = ROOT / "packaging" / "Dockerfile"
RECORD = ROOT / "packaging" / "base-image.txt"
BACKENDS = ("cpu", "cuda12", "cuda13")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_TAG = re.compile(r"^ARG BASE=(\S+)$", re.MULTILINE)


def tag() -> str:
    """The base that the Dockerfile names."""
    found = _TAG.search(DOCKERFILE.read_text())
    if found is None:
        sys.exit(f"{DOCKERFILE} has no ARG BASE=")
    return found[1]


def checked(digest: str) -> str:
    if _DIGEST.fullmatch(digest) is None:
        sys.exit(f"not a digest (sha256: and 64 hexadecimal digits): {digest[:100]!r}")
    return digest


def resolve() -> None:
    asked = ["buildx", "imagetools", "inspect", "--format", "{{.Manifest.Digest}}", tag()]
    done = subprocess.run([_docker(), *asked], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"docker does not know which image {tag()} is")
    digest = checked(done.stdout.strip())
    RECORD.write_text(f"{tag()}@{digest}\n")
    print(f"{RECORD.name}: {tag()}@{digest}")


def recorded() -> str:
    """The digest of the base that the Dockerfile names; ends the program where there is none."""
    advice = "Run `make base-image` first, and commit the file."
    try:
        name, _, digest = RECORD.read_text().strip().partition("@")
    except FileNotFoundError:
        sys.exit(f"A release is built from a base image with a recorded digest. {advice}")
    if name != tag():
        sys.exit(f"{RECORD.name} is for {name}, and the Dockerfile begins with {tag()}. {advice}")
    return checked(digest)


def build(backend: str, options: list[str]) -> None:
    if backend not in BACKENDS:
        sys.exit(f"BACKEND is one of {', '.join(BACKENDS)}, not {backend}")
    arguments = {"BASE_DIGEST": recorded(), "RELEASE": "1", "BACKEND": backend}
    given = [
        part for name, value in arguments.items() for part in ("--build-arg", f"{name}={value}")
    ]
    name = "millrace" if backend == "cpu" else f"millrace:{backend}"
    command = [_docker(), "build", "-f", str(DOCKERFILE), *given, "-t", name, *options, str(ROOT)]
    sys.exit(subprocess.run(command).returncode)


def _docker() -> str:
    found = shutil.which("docker")
    if found is None:
        sys.exit("There is no docker here.")
    return found


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["resolve"]:
            resolve()
        case ["build", *rest]:
            build(rest[0] if rest else "cpu", rest[1:])
        case _:
            sys.exit("usage: image.py resolve | build [BACKEND] [OPTIONS OF docker build]")
