"""The servers that the behaviours are asked of, started once for all of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from behaviours.owed import Mill, serve_scripted, serve_tiny


@pytest.fixture(scope="package")
def mill(tmp_path_factory: pytest.TempPathFactory, default_model: Path) -> Iterator[Mill]:
    yield from serve_tiny(tmp_path_factory.mktemp("behaviours"), default_model)


@pytest.fixture(scope="package")
def tiny(mill: Mill) -> httpx.Client:
    return mill.client


@pytest.fixture(scope="package")
def talker(tmp_path_factory: pytest.TempPathFactory, default_model: Path) -> Iterator[httpx.Client]:
    yield from serve_scripted(tmp_path_factory.mktemp("behaviours"), default_model)
