"""Embeddings and rerank through litellm and LangChain, which each have their own idea of a server."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from typing import Any

import litellm
import pytest
from conftest import PYTHON, ROOT, Server
from langchain_ollama import OllamaEmbeddings
from langchain_openai import OpenAIEmbeddings

TEXTS = ["the cat sat on the mat", "a dog", "banana"]
_MAKE = (
    "import sys, pathlib; from models import encoder_folders as f; f.{}(pathlib.Path(sys.argv[1]))"
)


def _served(folder: Any, kind: str) -> Iterator[Server]:
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    made = [PYTHON, "-c", _MAKE.format(kind), str(folder)]
    subprocess.run(made, check=True, env=os.environ | {"PYTHONPATH": paths})
    running = Server(str(folder), "--name", "tiny").wait_ready()
    yield running
    running.stop()


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    yield from _served(tmp_path_factory.mktemp("embedder") / "tiny", "encoder")


@pytest.fixture(scope="module")
def ranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    yield from _served(tmp_path_factory.mktemp("ranker") / "tiny", "classifier")


def _plain(server: Server, texts: list[str]) -> list[list[float]]:
    data = server.post("/v1/embeddings", {"input": texts}).json()["data"]
    return [d["embedding"] for d in data]


def _near(one: Any, other: Any) -> bool:
    pairs = [(a, b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True)]
    return all(abs(a - b) < 1e-5 for a, b in pairs)


@pytest.mark.parametrize("over", ["openai", "hosted_vllm", "ollama"])
def test_litellm_embeds(embedder: Server, over: str) -> None:
    base = embedder.url if over == "ollama" else f"{embedder.url}/v1"
    found = litellm.embedding(f"{over}/tiny", TEXTS, api_base=base, api_key="x")
    assert _near([d["embedding"] for d in found.data], _plain(embedder, TEXTS))
    assert found.usage.prompt_tokens > 0


@pytest.mark.parametrize(
    ("over", "path"), [("hosted_vllm", ""), ("cohere", "/v2/rerank"), ("jina_ai", "/v1/rerank")]
)
def test_litellm_reranks(ranker: Server, over: str, path: str) -> None:
    body = {"query": "the cat", "documents": TEXTS}
    expected = ranker.post("/rerank", body).json()["results"]
    found = litellm.rerank(
        f"{over}/tiny", "the cat", TEXTS, api_base=f"{ranker.url}{path}", api_key="x", top_n=3
    )
    results = found.results or []
    assert [r["index"] for r in results] == [r["index"] for r in expected]
    assert _near(
        [[r["relevance_score"] for r in results]], [[r["relevance_score"] for r in expected]]
    )


def test_langchain_embeds(embedder: Server) -> None:
    expected = _plain(embedder, TEXTS)
    openai = OpenAIEmbeddings(
        model="tiny",
        base_url=f"{embedder.url}/v1",
        api_key="x",  # type: ignore[arg-type]
        check_embedding_ctx_length=False,
    )
    assert _near(openai.embed_documents(TEXTS), expected)
    assert _near([openai.embed_query(TEXTS[0])], expected[:1])
    ollama = OllamaEmbeddings(model="tiny", base_url=embedder.url)
    assert _near(ollama.embed_documents(TEXTS), expected)
