"""docs/options.md is what the parser says; `MILLRACE_WRITE_DOCS=1` writes it anew."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from cli.options_document import document
from typer.testing import CliRunner

from millrace.cli.app import app
from millrace.cli.panels import ALIASES

DOCUMENT = Path(__file__).parents[2] / "docs" / "options.md"


def test_the_document_says_what_the_parser_says() -> None:
    written = document()
    if os.environ.get("MILLRACE_WRITE_DOCS"):
        DOCUMENT.write_text(written, encoding="utf-8")
    assert DOCUMENT.read_text(encoding="utf-8") == written


@pytest.mark.parametrize("name", [name for name in ALIASES if name != "name"])
def test_options_have_the_names_that_other_servers_have_for_them(name: str) -> None:
    own = f"--{name.replace('_', '-')}"
    for other in ALIASES[name]:
        for words in ([other, "many"], [f"{other}=many"]):
            told = CliRunner().invoke(app, ["serve", *words], env={"COLUMNS": "200"})
            assert told.exit_code == 2 and f"Invalid value for '{own}'" in told.output


def test_another_name_is_not_looked_for_behind_two_dashes() -> None:
    told = CliRunner().invoke(app, ["serve", "--port", "many", "--", "--ctx-size"])
    assert told.exit_code == 2 and "'--port'" in told.output
