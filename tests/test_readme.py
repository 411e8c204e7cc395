"""README's every command is run, and what it names is there.

Commands are run as they stand but for what SUBSTITUTES names. One that this file does not know fails the
test: whoever writes it into the README says here how it is proven.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from conftest import ROOT, Server
from markdown_it import MarkdownIt
from typer.testing import CliRunner

from millrace.cli.app import app

README = (ROOT / "README.md").read_text("utf-8")
SERVE = "millrace serve mlx-community/Qwen3-4B-4bit"
SUBSTITUTES = {
    "http://127.0.0.1:8000": "the address of the test's own server, which takes a free port",
    SERVE: "the default model, which is here, in place of one that would have to be fetched",
    "millrace chat": "with --url and --max-tokens, and a question on standard input",
    "Tell me a story.": "a story of some words: `max_tokens` is given",
}
PROGRAMS = {
    "make",
    "millrace",
    "curl",
    "pip",
    "pipx",
    "uv",
    "python",
    "docker",
    "brew",
    "npm",
    "git",
}
ELSEWHERE = {
    "pip install .": "make test-package",
    "pipx install .": "make test-package",
    "uv tool install .": "make test-package",
}
"""What installs is run by a target of its own, into nothing."""
NEEDS_MORE = {"backend", "worker", "prove", "service", "clean", "bench", "embed", "launch"}
"""Commands that want another program, minutes or something to lose: tested by their own files. Here, that
they are there."""


def _commands() -> tuple[list[str], list[str]]:
    """Shell commands in blocks and within lines, and Python programs."""
    shell: list[str] = []
    python: list[str] = []
    parser = MarkdownIt("commonmark").enable("table")
    for token in parser.parse(README):
        if token.type == "fence" and token.info == "python":
            python.append(token.content)
        elif token.type in ("code_block", "fence"):
            joined = token.content.replace("\\\n", " ")
            shell += [line.strip() for line in joined.splitlines() if line.strip()]
        for child in token.children or ():
            words = child.content.split()
            if child.type == "code_inline" and len(words) > 1 and words[0] in PROGRAMS:
                shell.append(child.content)
    return [re.sub(r"\s+#.*", "", command) for command in shell], python


SHELL, PYTHON_BLOCKS = _commands()


def _sh(command: str, shim: Path, stdin: str = "") -> str:
    """What a shell says that finds `millrace` on its PATH."""
    program = shim / "millrace"
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m millrace "$@"\n')
    program.chmod(0o755)
    done = subprocess.run(
        ["sh", "-c", command],
        cwd=ROOT,
        env=os.environ | {"PATH": f"{shim}{os.pathsep}{os.environ['PATH']}"},
        input=stdin,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, f"{command}: {done.stdout[-500:]}{done.stderr[-2000:]}"
    return done.stdout


@pytest.mark.parametrize("command", sorted(set(SHELL)))
def test_every_command_works(command: str, server: Server, tmp_path: Path) -> None:
    program, *arguments = shlex.split(command)
    if program == "make":
        planned = _sh(shlex.join(["make", "-nB", *arguments]), tmp_path)
        asked = next((a.removeprefix("ARGS=") for a in arguments if a.startswith("ARGS=")), "")
        wanted = {"serve": f"millrace serve {asked}".strip(), "test": "pytest -n"}
        assert wanted[arguments[0]] in planned
        backend = next((a.removeprefix("BACKEND=") for a in arguments if "BACKEND=" in a), "")
        assert backend in planned
    elif command in ELSEWHERE:
        target = ELSEWHERE[command].removeprefix("make ")
        if f"\n{target}:" not in (ROOT / "Makefile").read_text():
            pytest.skip(f"there is no make {target} here")
    elif program == "curl":
        said = _sh(command.replace("http://127.0.0.1:8000", server.url), tmp_path)
        assert "Paris" in said
    elif command == "millrace chat":
        more = f"--url {server.url} --max-tokens 8"
        assert _sh(f"{command} {more}", tmp_path, "What is the capital of France?\n")
    elif command == "millrace doctor":
        assert "models that fit" in _sh(command, tmp_path)
    elif command in ("millrace serve", SERVE):
        assert server.health()["status"] == "ready"  # started by that very command
    elif command == "millrace --help":
        assert "serve" in _help()
    else:
        assert program == "millrace" and arguments[0] in NEEDS_MORE, (
            f"README has the command '{command}', and nothing here runs it"
        )
        assert "Usage" in _help(arguments[0])


def _help(*command: str) -> str:
    shown = CliRunner().invoke(app, [*command, "--help"], env={"COLUMNS": "200"})
    assert shown.exit_code == 0, shown.output
    return shown.output


@pytest.mark.parametrize("program", PYTHON_BLOCKS, ids=lambda block: block.split()[1])
def test_every_program_works(program: str, server: Server) -> None:
    program = program.replace("http://127.0.0.1:8000", server.url)
    program = program.replace('story."}]', 'story."}], max_tokens=12')
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(done.stdout.split()) > 5


def test_every_path_option_and_command_that_it_names_is_there(server: Server) -> None:
    inline = set(re.findall(r"`([^`\n]+)`", README))
    known = set(server.http.get("/openapi.json").json()["paths"])
    paths = {code for code in inline if re.fullmatch(r"/[a-z_/0-9.]*", code)}
    assert paths - known <= {"/"}, "paths that there are not"
    options = {code for code in inline if re.fullmatch(r"--[a-z-]+", code)}
    serving = _help("serve")
    assert {option for option in options if option not in serving} == set()
    (row,) = re.findall(r"^\| Python API, CLI \| `LLM`; (.*) \|$", README, re.M)
    named = set(re.findall(r"`([a-z]+)`", row))
    assert named == set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


def test_every_page_that_it_links_to_is_there() -> None:
    links = set(re.findall(r"\]\(([^)#]+)", README))
    assert {link for link in links if ":" not in link and not (ROOT / link).exists()} == set()


def test_the_table_of_machines_is_the_one_that_doctor_has() -> None:
    from millrace.models.suggestions import SUGGESTIONS

    (table,) = re.findall(r"^\| memory \| \|\n(?:\|.*\n)+", README, re.M)
    missing = [s.name for s in SUGGESTIONS if not re.search(rf"\b{re.escape(s.name)}\b", table)]
    assert missing == []
