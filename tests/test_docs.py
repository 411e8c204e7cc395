"""The docs: every page is in the site's navigation, and every link leads to a file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted((ROOT / "docs").glob("*.md"))
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_CODE = re.compile(r"^```.*?^```", re.M | re.S)


def test_the_navigation_has_every_page_once() -> None:
    listed = re.findall(r"- ([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text("utf-8"), re.M)
    assert sorted(listed) == [page.name for page in PAGES]


@pytest.mark.parametrize(
    "page", [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name
)
def test_links_lead_to_files(page: Path) -> None:
    text = _CODE.sub("", page.read_text("utf-8"))
    places = [link.partition("#")[0] for link in _LINK.findall(text) if "://" not in link]
    missing = [place for place in places if place and not (page.parent / place).exists()]
    assert missing == []
