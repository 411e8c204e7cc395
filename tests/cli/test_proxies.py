"""Commands talk to a server on this machine directly, whatever proxy the environment names."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cli.fake_server import Fake, playing

from millrace.cli import loaded, remote
from millrace.errors import EngineUnavailable


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fake]:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    with playing() as server:
        yield server


def test_a_server_here_is_asked_directly(fake: Fake) -> None:
    assert remote.Server(fake.url).models() == ["fake"]
    assert loaded._ask(fake.url, None, "GET", "/health") == {"status": "ready"}


def test_a_server_elsewhere_is_asked_through_the_proxy(fake: Fake) -> None:
    with pytest.raises(EngineUnavailable):
        remote.Server("http://server.invalid").models()


def test_addresses_of_this_machine() -> None:
    for url in ("http://127.0.0.1:8000", "localhost:8000", "http://[::1]:8000/v1", "127.1.2.3"):
        assert remote.is_local(url), url
    for url in ("http://10.0.0.1:8000", "http://localhost.example.org", "http://[", ""):
        assert not remote.is_local(url), url
