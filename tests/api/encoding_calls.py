"""What tests of encoders over HTTP share: servers, refusals, and what plain numpy says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from conftest import Server
from models import encoder_folders as folders
from models import numpy_encoders as plain
from tokenizers import Tokenizer

LENGTH = 24
LONG = "the cat sat on the mat " * 10


def serve(folder: Path, *options: str) -> Iterator[Server]:
    running = Server(str(folder), "--name", "tiny", *options).wait_ready()
    yield running
    running.stop()


class Oracle:
    """What sentence-transformers would say."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.weights = folders.read(folder)
        self.config = json.loads((folder / "config.json").read_text())

    def ids(self, text: str, limit: int = LENGTH) -> list[int]:
        ids = self.tokenizer.encode(text.strip()).ids
        return ids if len(ids) <= limit else [*ids[: limit - 1], ids[-1]]

    def vector(self, ids: list[int], size: int | None = None) -> Any:
        return plain.unit(plain.bert(self.weights, self.config, ids).mean(0)[:size])


def embedded(server: Server, **body: Any) -> Any:
    response = server.post("/v1/embeddings", body)
    assert response.status_code == 200, response.text
    return np.array([item["embedding"] for item in response.json()["data"]])


def near(found: Any, expected: Any) -> bool:
    return bool(np.abs(np.asarray(found) - np.asarray(expected)).max() < 1e-4)


def refused(server: Server, path: str, body: Any, *words: str) -> Any:
    response = server.post(path, body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    message = error if isinstance(error, str) else error["message"]
    assert all(w in message for w in words), message
    return error
