"""Embeddings over HTTP, held to plain numpy and to each protocol's shape."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import conftest
import httpx
import numpy as np
import ollama
import openai
import pytest
from api.encoding_calls import LENGTH, LONG, Oracle, embedded, near, refused
from conftest import PATIENCE, Server
from models import encoder_folders as folders
from models import numpy_encoders as plain

PROMPTS = {"query": "query : ", "document": "title : none text : "}
TEXTS = ["the cat sat", "a dog sat on the mat", "banana", "Paris is the capital of France", ""]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = folders.encoder(
        tmp_path_factory.mktemp("encode") / "tiny", matryoshka_dimensions=[8, 16]
    )
    pooling = ("Pooling", "1_Pooling", {"pooling_mode": "mean"})
    return folders.sentence(
        made,
        modules=[pooling, ("Normalize", "2_Normalize", {})],
        sentence_bert_config={"max_seq_length": LENGTH},
        config_sentence_transformers={"prompts": PROMPTS},
    )


@pytest.fixture(scope="module")
def embedder(folder: Path) -> Iterator[Server]:
    running = Server(str(folder), "--name", "tiny").wait_ready()
    yield running
    running.stop()


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Oracle:
    return Oracle(folder)


def test_texts_equal_the_oracle_together_and_alone(embedder: Server, oracle: Oracle) -> None:
    expected = [oracle.vector(oracle.ids(t)) for t in TEXTS]
    assert near(embedded(embedder, input=TEXTS), expected)
    for text, vector in zip(TEXTS, expected, strict=True):
        assert near(embedded(embedder, input=text), [vector])


def test_usage_counts_what_was_run(embedder: Server, oracle: Oracle) -> None:
    response = embedder.post("/v1/embeddings", {"input": [*TEXTS, LONG], "truncate": True}).json()
    tokens = sum(len(oracle.ids(t)) for t in [*TEXTS, LONG])
    assert response["usage"] == {
        "prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0
    }  # fmt: skip
    assert [d["index"] for d in response["data"]] == list(range(6))
    assert response["object"] == "list" and response["model"] == "tiny"


def test_token_ids_are_taken_as_they_are_and_checked(embedder: Server, oracle: Oracle) -> None:
    ids = [2, 40, 41, 3]
    assert near(embedded(embedder, input=ids), [oracle.vector(ids)])
    both = [oracle.vector(ids), oracle.vector([2, 50, 3])]
    assert near(embedded(embedder, input=[ids, [2, 50, 3]]), both)
    width = oracle.config["vocab_size"]
    for bad in ([width], [-1], [2**31], [2**63], [2**70], [[1], [width]]):
        assert refused(embedder, "/v1/embeddings", {"input": bad})["param"] == "input"
    for bad in ([], [[]], [[1], []], [1, "a"], ["a", [1]], [True], [1.5], [None], {}, 7, [["a"]]):
        refused(embedder, "/v1/embeddings", {"input": bad})


def test_too_long_is_refused_unless_it_may_be_cut(embedder: Server, oracle: Oracle) -> None:
    error = refused(embedder, "/v1/embeddings", {"input": ["a", LONG]}, "input[1]", "62", "24")
    assert error["code"] == "context_length_exceeded"
    whole = oracle.vector(oracle.ids(LONG))
    for wish in ({"truncate": True}, {"truncate": "END"}, {"truncate_prompt_tokens": -1}):
        assert near(embedded(embedder, input=LONG, **wish), [whole])
    short = oracle.vector(oracle.ids(LONG, 10))
    assert near(embedded(embedder, input=LONG, truncate_prompt_tokens=10), [short])
    ids = oracle.tokenizer.encode(LONG.strip()).ids
    end = oracle.vector([ids[0], *ids[-LENGTH + 1 :]])
    assert near(embedded(embedder, input=LONG, truncate="START"), [end])
    refused(embedder, "/v1/embeddings", {"input": LONG, "truncate_prompt_tokens": 25}, "24")
    refused(embedder, "/v1/embeddings", {"input": LONG, "truncate_prompt_tokens": 2}, "3")
    refused(embedder, "/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 0}, "cut to 0")
    refused(embedder, "/v1/embeddings", {"input": LONG, "truncate_prompt_tokens": 10, "truncate":
            False})  # fmt: skip


def test_prompts_are_put_before_texts(embedder: Server, oracle: Oracle) -> None:
    asked = oracle.vector(oracle.ids(PROMPTS["query"] + "banana"))
    told = oracle.vector(oracle.ids(PROMPTS["document"] + "banana"))
    for wish, expected in (
        ({"prompt_name": "query"}, asked),
        ({"input_type": "query"}, asked),
        ({"input_type": "search_query"}, asked),
        ({"input_type": "passage"}, told),
        ({"input_type": "document"}, told),
        ({"input_type": "clustering"}, oracle.vector(oracle.ids("banana"))),
    ):
        assert near(embedded(embedder, input="banana", **wish), [expected]), wish
    refused(embedder, "/v1/embeddings", {"input": "x", "prompt_name": "nope"}, "document, query")
    refused(embedder, "/v1/embeddings", {"input": "x", "input_type": "nope"})
    refused(embedder, "/v1/embeddings", {"input": [1], "prompt_name": "query"}, "no prompt")


def test_dimensions_cut_and_make_length_one_again(embedder: Server, oracle: Oracle) -> None:
    ids = oracle.ids("the cat")
    assert near(embedded(embedder, input="the cat", dimensions=8), [oracle.vector(ids, 8)])
    assert near(embedded(embedder, input="the cat", dimensions=32), [oracle.vector(ids)])
    for bad in (0, 9, 33, 2**63 - 1, 2**70, -1, "8", 8.5, True):
        assert refused(embedder, "/v1/embeddings", {"input": "x", "dimensions": bad})
    long = embedded(embedder, input="the cat", normalize=False)
    assert near(long, [plain.bert(oracle.weights, oracle.config, ids).mean(0)])


def test_base64_is_little_endian_float32(embedder: Server) -> None:
    numbers = embedded(embedder, input=TEXTS)
    body = {"input": TEXTS, "encoding_format": "base64"}
    data = embedder.post("/v1/embeddings", body).json()["data"]
    found = [np.frombuffer(base64.b64decode(d["embedding"]), "<f4") for d in data]
    assert near(found, numbers)


def test_the_openai_sdk_and_the_ollama_client_understand(embedder: Server, oracle: Oracle) -> None:
    expected = oracle.vector(oracle.ids("banana"))
    sdk = openai.OpenAI(base_url=f"{embedder.url}/v1", api_key="x")
    answer = sdk.embeddings.create(model="tiny", input=["banana", "a dog"])
    assert near(answer.data[0].embedding, expected) and answer.usage.prompt_tokens == 7
    client = ollama.Client(embedder.url)
    found = client.embed("tiny:latest", ["banana", LONG])
    assert near(found.embeddings[0], expected) and found.prompt_eval_count == 3 + LENGTH
    assert near(client.embeddings("tiny", "banana").embedding, expected)
    with pytest.raises(ollama.ResponseError, match="24"):
        client.embed("tiny", LONG, truncate=False)
    assert client.embed("tiny", "").embeddings == []
    assert client.show("tiny").capabilities == ["embedding"]


def test_teis_embed(embedder: Server, oracle: Oracle) -> None:
    found = embedder.post("/embed", {"inputs": ["banana", "the cat"]}).json()
    assert near(found, [oracle.vector(oracle.ids(t)) for t in ("banana", "the cat")])
    assert len(embedder.post("/embed", {"inputs": "banana"}).json()) == 1
    response = embedder.post("/embed", {"inputs": LONG})
    assert response.status_code == 400 and response.json()["error_type"] == "Validation"
    cut = embedder.post("/embed", {"inputs": LONG, "truncate": True}).json()
    assert near(cut, [oracle.vector(oracle.ids(LONG))])
    named = embedder.post("/embed", {"inputs": "a", "prompt_name": "query"}).json()
    assert near(named, [oracle.vector(oracle.ids(PROMPTS["query"] + "a"))])
    raw = np.array(embedder.post("/embed", {"inputs": "a", "normalize": False}).json())
    assert near(raw, [plain.bert(oracle.weights, oracle.config, oracle.ids("a")).mean(0)])


def test_pooling_gives_vectors_of_texts_or_of_tokens(embedder: Server, oracle: Oracle) -> None:
    one = embedder.post("/pooling", {"input": "banana"}).json()["data"][0]
    assert one["object"] == "pooling" and near(one["data"], oracle.vector(oracle.ids("banana")))
    body = {"input": ["banana", "the cat sat"], "task": "token_embed"}
    each = embedder.post("/pooling", body).json()["data"][0]["data"]
    assert near(each, plain.bert(oracle.weights, oracle.config, oracle.ids("banana")))


def test_an_embedder_ranks_by_cosine(embedder: Server, oracle: Oracle) -> None:
    documents = ["the mat", "banana", "a dog"]
    query = oracle.vector(oracle.ids(PROMPTS["query"] + "the cat"))
    expected = [
        float(query @ oracle.vector(oracle.ids(PROMPTS["document"] + d))) for d in documents
    ]
    body = {"query": "the cat", "documents": documents, "return_documents": True, "top_n": 2}
    answer = embedder.post("/v2/rerank", body).json()
    order = sorted(range(3), key=lambda n: -expected[n])[:2]
    assert [r["index"] for r in answer["results"]] == order
    assert near([r["relevance_score"] for r in answer["results"]], [expected[n] for n in order])
    assert answer["results"][0]["document"] == {"text": documents[order[0]]}
    body = {"text_1": "the cat", "text_2": documents}
    found = embedder.post("/score", body).json()["data"]
    assert near([d["score"] for d in found], expected)
    body = {"query": "the cat", "documents": ["the mat"], "max_tokens_per_doc": 1}
    first = float(query @ oracle.vector(oracle.ids(PROMPTS["document"] + "the")))
    (ranked,) = embedder.post("/v2/rerank", body).json()["results"]
    assert near(ranked["relevance_score"], first)


def test_ollama_loads_and_lets_go_of_an_embedder(embedder: Server) -> None:
    for path, empty in (("/api/generate", {}), ("/api/chat", {"messages": []})):
        told = embedder.post(path, {"model": "tiny", "keep_alive": 0, **empty})
        assert told.status_code == 200 and told.json()["done_reason"] == "unload"
        told = embedder.post(path, {"model": "tiny", **empty})
        assert told.status_code == 200 and told.json()["done_reason"] == "load"


def test_every_list_of_inputs_has_the_same_bound(embedder: Server) -> None:
    many = ["a"] * 2049
    for path, body in {
        "/api/embed": {"model": "tiny", "input": many},
        "/embed": {"inputs": many},
        "/pooling": {"input": many},
        "/classify": {"input": many},
        "/v1/rerank": {"query": "a", "documents": many},
        "/rerank": {"query": "a", "texts": many},
        "/score": {"text_1": "a", "text_2": many},
        "/v1/score": {"queries": many, "documents": many},
        "/tokenize": {"prompt": many},
        "/v1/detokenize": {"tokens": [[1]] * 2049},
        "/generate": {"text": many},
        "/v1/completions": {"prompt": many},
    }.items():
        refused(embedder, path, body, "2049", "2048")


def test_text_and_numbers_are_told_apart(embedder: Server, server: Server) -> None:
    hello = [{"role": "user", "content": "hi"}]
    for path, body in {
        "/v1/chat/completions": {"messages": hello},
        "/v1/completions": {"prompt": "hi"},
        "/v1/responses": {"input": "hi"},
        "/generate": {"text": "hi"},
        "/api/chat": {"messages": hello},
        "/api/generate": {"prompt": "hi"},
    }.items():
        refused(embedder, path, body, "no text")
    anthropic = embedder.post("/v1/messages", {"messages": hello, "max_tokens": 3, "model": "tiny"})
    assert anthropic.status_code == 400 and anthropic.json()["type"] == "error"
    for path, body in {
        "/v1/embeddings": {"input": "hi"},
        "/embed": {"inputs": "hi"},
        "/api/embed": {"input": "hi"},
        "/rerank": {"query": "x", "documents": ["y"]},
        "/score": {"text_1": "x", "text_2": "y"},
        "/classify": {"input": "x"},
        "/pooling": {"input": "x"},
    }.items():
        refused(server, path, body, "--embed")
    refused(embedder, "/classify", {"input": "x"}, "no classifier")


def test_2048_texts_are_one_request_and_more_are_refused(embedder: Server) -> None:
    assert len(embedded(embedder, input=["a"] * 2048)) == 2048
    refused(embedder, "/v1/embeddings", {"input": ["a"] * 2049}, "2049", "2048")


@contextlib.contextmanager
def held(server: Server) -> Iterator[int]:
    """An engine that does not get to run: what it is given waits."""
    pid = server.engine
    with conftest.held(pid):
        yield pid


def until(server: Server, requests: int) -> None:
    assert conftest.until(lambda: len(server.status()["requests"]) == requests)


def test_a_small_request_does_not_wait_for_a_large_one(embedder: Server) -> None:
    def ask(name: str, given: Any) -> threading.Thread:
        body, headers = {"input": given, "truncate": True}, {"x-request-id": name}
        worker = threading.Thread(
            target=lambda: embedder.post("/v1/embeddings", body, headers=headers)
        )
        worker.start()
        return worker

    with held(embedder):
        large = ask("large", [LONG] * 2048)
        until(embedder, 1)
        small = ask("small", "banana")
        until(embedder, 2)
    small.join(PATIENCE)
    large.join(PATIENCE)
    ended = embedder.http.get("/v1/requests", params={"limit": 2}).json()["ended"]
    assert [r["id"] for r in ended] == ["large", "small"], "newest first"


def test_a_killed_engine_loses_nothing(embedder: Server) -> None:
    body = {"input": [f"{LONG} {n}" for n in range(300)], "truncate": True}
    expected = embedder.post("/v1/embeddings", body).json()["data"]
    before = embedder.status()["restarts"]
    found: list[httpx.Response] = []
    worker = threading.Thread(target=lambda: found.append(embedder.post("/v1/embeddings", body)))
    with held(embedder) as pid:
        worker.start()
        until(embedder, 1)
        with contextlib.suppress(ProcessLookupError):  # held for long, it is ended by the server
            os.kill(pid, signal.SIGKILL)
    worker.join(PATIENCE)
    assert found[0].status_code == 200, found[0].text
    pairs = zip(found[0].json()["data"], expected, strict=True)
    assert all(near(a["embedding"], b["embedding"]) for a, b in pairs)
    assert embedder.status()["restarts"] == before + 1


def test_a_client_that_leaves_frees_the_engine(embedder: Server) -> None:
    body = {"input": [LONG] * 2048, "truncate": True}

    async def leave() -> None:
        async with httpx.AsyncClient(base_url=embedder.url) as client:
            task = asyncio.create_task(client.post("/v1/embeddings", json=body, timeout=PATIENCE))
            await asyncio.to_thread(until, embedder, 1)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    with held(embedder):
        asyncio.run(leave())
        until(embedder, 0)
    with held(embedder):
        mine = {"x-request-id": "mine"}
        cancelled = threading.Thread(
            target=lambda: embedder.post("/v1/embeddings", body, headers=mine)
        )
        cancelled.start()
        until(embedder, 1)
        assert embedder.post("/v1/requests/mine/cancel", {}).status_code == 200
        cancelled.join(PATIENCE)
        assert not cancelled.is_alive()
    assert len(embedded(embedder, input="banana")) == 1
