"""Embeddings and rerank from Python and from the command line, without a server."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from models import encoder_folders as folders
from models import numpy_encoders as plain
from tokenizers import Tokenizer

from millrace import LLM
from millrace.errors import BadRequest


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folders.encoder(tmp_path_factory.mktemp("llm") / "tiny")


def _expected(folder: Path, text: str) -> np.ndarray:
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    config = json.loads((folder / "config.json").read_text())
    return plain.unit(plain.bert(folders.read(folder), config, ids).mean(0))


def test_vectors_and_ranks_from_python(folder: Path) -> None:
    with LLM(str(folder)) as llm:
        assert np.abs(np.array(llm.embed("the cat")) - _expected(folder, "the cat")).max() < 1e-4
        both = llm.embed(["the cat", "a dog"])
        assert np.abs(np.array(both[1]) - _expected(folder, "a dog")).max() < 1e-4
        assert llm.embed([]) == []
        assert [n for n, _ in llm.rerank("the cat", ["a dog", "the cat"])] == [1, 0]
        with pytest.raises(BadRequest, match="96"):
            llm.embed("the cat " * 99)
        assert len(llm.embed("the cat " * 99, truncate=True)) == folders.WIDTH
        with pytest.raises(BadRequest, match="no text"):
            llm.generate("hi")


def test_vectors_from_the_command_line(folder: Path) -> None:
    command = [sys.executable, "-m", "millrace", "embed", "--model", str(folder)]
    done = subprocess.run([*command, "the cat", "a dog"], capture_output=True, timeout=120)
    first, second = map(json.loads, done.stdout.splitlines())
    assert np.abs(np.array(first) - _expected(folder, "the cat")).max() < 1e-4
    piped = subprocess.run(command, input=b"a dog\n\n", capture_output=True, timeout=120)
    assert np.abs(np.array(json.loads(piped.stdout.splitlines()[0])) - second).max() < 1e-5
    assert len(piped.stdout.splitlines()) == 2
