"""docs/behaviours.md is the list: every line of it names the tests that show it, and all there are."""

from __future__ import annotations

import re
from pathlib import Path

from conftest import ROOT

LINE = re.compile(r"^\| (\d+) \| (.+) \| (.+) \|$", re.MULTILINE)
TEST = re.compile(r"^def (test_(\d\d)_\w+)", re.MULTILINE)


def test_every_line_names_its_tests() -> None:
    lines = LINE.findall((ROOT / "docs" / "behaviours.md").read_text(encoding="utf-8"))
    numbers = [int(number) for number, _, _ in lines]
    assert numbers == list(range(1, len(numbers) + 1))
    written = "\n".join(file.read_text() for file in Path(__file__).parent.glob("test_lines_*.py"))
    tests: dict[int, set[str]] = {}
    for name, number in TEST.findall(written):
        tests.setdefault(int(number), set()).add(name)
    named = {int(n): set(re.findall(r"`(test_\w+)`", shown)) for n, _, shown in lines}
    waiting = {int(n) for n, _, shown in lines if shown.startswith("waits for ")}
    assert {n: names for n, names in named.items() if names} == tests
    assert waiting == {n for n, names in named.items() if not names}
