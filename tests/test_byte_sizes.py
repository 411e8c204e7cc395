"""Sizes: how options spell them, how people are shown them, and that one kind of unit is used."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer

from millrace.cli.app import app
from millrace.serving.memory import ModelMemory
from millrace.sizes import bytes_in, format_bytes

ROOT = Path(__file__).resolve().parents[1]
SHOWN = {
    0: "0 B",
    999: "999 B",
    1000: "1.0 kB",
    57_500: "58 kB",
    999_499: "999 kB",
    999_500: "1.0 MB",
    9_949_999: "9.9 MB",
    9_950_000: "10 MB",
    102_000_000: "102 MB",
    999_700_000: "1.0 GB",
    8_240_000_000: "8.2 GB",
    152_100_000_000: "152.1 GB",
    999_960_000_000: "1.0 TB",
    -4_000_000: "-4.0 MB",
}
BINARY = re.compile(r"\b[KMGT]iB\b|\b(kibi|mebi|gibi|tebi)bytes?\b", re.IGNORECASE)


@pytest.mark.parametrize(("count", "text"), SHOWN.items())
def test_sizes_are_shown_in_decimal_units(count: int, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.skipif(shutil.which("node") is None, reason="the page's scripts need node")
def test_the_page_shows_the_same() -> None:
    assert _in_page(f"{json.dumps([*SHOWN])}.map(m.bytes)") == [*SHOWN.values()]
    memory = ModelMemory(weights=102_000_000, kv_in_use=1_500_000, ceiling=8_240_000_000)
    assert _in_page(f"m.memoryText({msgspec.json.encode(memory).decode()})") == memory.in_words()
    assert memory.in_words() == (
        "weights 102 MB, key-value memory 1.5 MB in use, at most 8.2 GB in all"
    )


def _in_page(expression: str) -> Any:
    """The value of an expression in which `m` is the page's module of formats."""
    module = json.dumps((ROOT / "millrace/api/web/format.js").as_uri())
    script = f"import({module}).then((m) => console.log(JSON.stringify({expression})))"
    done = subprocess.run(["node", "-e", script], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.parametrize("text", ["12G", "12GB", "12GiB", "12 gib", "12288M", "12288 MiB"])
def test_options_take_both_spellings(text: str) -> None:
    assert bytes_in(text) == 12 << 30


@pytest.mark.parametrize("text", ["", "G", "12 apples", "-1G", "1e9"])
def test_other_texts_are_no_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="not a size"):
        bytes_in(text)


def test_documents_use_decimal_units() -> None:
    """Code spans are exempt: they show what can be typed."""
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        text = re.sub(r"`[^`\n]*`", "", page.read_text())
        assert not (found := BINARY.findall(text)), (page, found)


def test_messages_use_decimal_units() -> None:
    for file in sorted((ROOT / "millrace").rglob("*.py")):
        tree = ast.parse(file.read_text())
        documented = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
        for node in ast.walk(tree):
            if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
                continue
            shown = id(node) not in documented
            assert not (shown and BINARY.search(node.value)), (file, node.lineno, node.value)


def test_the_page_uses_decimal_units() -> None:
    for file in sorted((ROOT / "millrace/api/web").iterdir()):
        if file.suffix in (".js", ".html"):
            assert not BINARY.search(file.read_text()), file


def test_help_uses_decimal_units() -> None:
    root = typer.main.get_command(app)
    for name, command in root.commands.items():  # type: ignore[attr-defined]
        for parameter in command.params:
            assert not BINARY.search(getattr(parameter, "help", None) or ""), (name, parameter)
        assert not BINARY.search(command.help or ""), name
