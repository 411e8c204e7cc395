"""Every shape in every way to run: the tokens are those of the plain loop, and docs/parity.md says so.

`MILLRACE_WRITE_DOCS=1` writes the document anew.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import tiny
from engine.parity_cells import COLUMNS, Subject
from engine.parity_document import WORDS, document
from paging.own_kinds import OWN_KINDS

DOCUMENT = Path(__file__).parents[2] / "docs" / "parity.md"
_found: dict[tuple[str, str], str] = {}


@pytest.fixture(scope="module", params=[*tiny.SHAPES, *OWN_KINDS])
def subject(request: pytest.FixtureRequest) -> Subject:
    return Subject(request.param)


@pytest.mark.parametrize("column", COLUMNS)
def test_tokens_are_those_of_the_plain_loop(subject: Subject, column: str, tmp_path: Path) -> None:
    word = COLUMNS[column](subject, tmp_path)
    assert word is None or word in WORDS
    _found[subject.shape, column] = word or "equal"


def test_the_document_says_what_was_found() -> None:
    shapes = [*tiny.SHAPES, *OWN_KINDS]
    if len(_found) != len(shapes) * len(COLUMNS):
        pytest.skip("needs the results of all cells; some were not selected or failed")
    written = document(shapes, _found)
    if os.environ.get("MILLRACE_WRITE_DOCS"):
        DOCUMENT.write_text(written)
    assert DOCUMENT.read_text() == written
