"""`millrace stop` with one word: a model, or a server by its name or port."""

from __future__ import annotations

from typing import Any

import pytest
from typer.testing import CliRunner

from millrace.cli import loaded, local_servers
from millrace.cli.app import app
from millrace.errors import SetupError
from millrace.servers import ServerRecord

SERVERS = [
    ServerRecord(host="127.0.0.1", port=8001, pid=1, name="mill", models=("smollm2",)),
    ServerRecord(host="127.0.0.1", port=8002, pid=2, name="smollm2", models=("other",)),
]


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    did: list[str] = []

    def ask(url: str, *_: Any) -> dict[str, Any]:
        did.append(f"unload at {url}")
        return {"id": "m"}

    monkeypatch.setattr(local_servers, "all_servers", lambda: SERVERS)
    monkeypatch.setattr(loaded, "_end", lambda record: did.append(f"end {record.port}"))
    monkeypatch.setattr(loaded, "_ask", ask)
    return did


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["mill"], "end 8001"),
        (["8002"], "end 8002"),
        (["--port", "8001"], "end 8001"),
        (["smollm2", "--port", "8001"], "unload at http://127.0.0.1:8001"),
        (["mill", "--port", "8002"], "unload at http://127.0.0.1:8002"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_one_word_is_enough(done: list[str], words: list[str], what: str) -> None:
    result = CliRunner().invoke(app, ["stop", *words])
    assert result.exit_code == 0, result.exception
    assert done == [what]


def test_a_model_is_meant_before_a_server(done: list[str]) -> None:
    result = CliRunner().invoke(app, ["stop", "smollm2"])
    assert isinstance(result.exception, SetupError), "there are two servers to choose from"
    assert done == []
