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
    "max_tokens=200": "12: a story of some words",
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
    "pip install openai": "make test",
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
        given = dict(a.split("=", 1) for a in arguments if "=" in a)
        asked = " ".join(filter(None, (given.get("MODEL"), given.get("ARGS"))))
        wanted = {
            "serve": f"millrace serve {asked}".strip(),
            "chat": f"millrace chat {asked}".strip(),
            "prove": f"millrace prove {asked}".strip(),
            "test": "pytest -n",
        }
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
    elif command == "millrace serve auto":
        assert (ROOT / "tests" / "cli" / "test_auto.py").is_file()  # it is run there, with a hub
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
    assert "max_tokens=200" in program, "a small model's story can run for thousands of tokens"
    program = program.replace("max_tokens=200", "max_tokens=12")
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


def test_its_first_lines_promise_what_was_proven() -> None:
    first = " ".join(README.partition("\n## ")[0].split())
    assert "we have not run it there" in first, "as long as docs/platforms.md says so of macOS"
    assert "**Not run by us**" in (ROOT / "docs" / "platforms.md").read_text("utf-8")
    assert "`make prove`" in first and "millrace-proof.md" in first
    assert "float32" in first and "bfloat16" in first


def test_what_a_new_user_types_after_make_serve_needs_nothing_on_the_path() -> None:
    """`make serve` installs into .venv alone: up to the list of features, chat is make's."""
    story = README.partition("\n## What works")[0]
    assert "`make chat`" in story and ".venv/bin/millrace" in story
    assert story.index("`make chat`") < story.index("`millrace chat`")


def test_the_table_of_machines_names_models_of_the_table_alone() -> None:
    from millrace.models.short_names import all_names

    (table,) = re.findall(r"^\| memory \| \|\n(?:\|.*\n)+", README, re.M)
    named = re.findall(r"`([^`]+)`", table)
    assert len(named) > 15
    assert set(named) <= {model.name for model in all_names()}
