"""Rerank, scores and classes over HTTP, and decoders used as encoders, held to plain numpy."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from api.encoding_calls import LONG, Oracle, embedded, near, refused, serve
from conftest import Server
from models import encoder_folders as folders
from models import numpy_encoders as plain


@pytest.fixture(scope="module")
def ranker_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folders.classifier(tmp_path_factory.mktemp("ranker") / "tiny")


@pytest.fixture(scope="module")
def ranker(ranker_folder: Path) -> Iterator[Server]:
    yield from serve(ranker_folder)


DOCUMENTS = ["Paris is the capital of France", "banana", "the cat sat on the mat " * 40]


def paired(folder: Path, query: str) -> list[float]:
    """A cross-encoder's logit of each document, in plain numpy."""
    made = Oracle(folder)
    made.tokenizer.enable_truncation(folders.POSITIONS)
    found = []
    for document in DOCUMENTS:
        encoding = made.tokenizer.encode(query, document)
        x = plain.bert(made.weights, made.config, encoding.ids, encoding.type_ids, "bert.")[0]
        x = np.tanh(plain.linear(made.weights, "bert.pooler.dense", x))
        found.append(float(plain.linear(made.weights, "classifier", x)[0]))
    return found


def test_a_classifier_reranks_as_the_oracle_does(ranker: Server, ranker_folder: Path) -> None:
    logits = paired(ranker_folder, "capital of France")
    scores = [1 / (1 + math.exp(-x)) for x in logits]
    order = sorted(range(3), key=lambda n: -scores[n])
    body: dict[str, Any] = {"query": "capital of France", "documents": DOCUMENTS}
    for path in ("/v1/rerank", "/v2/rerank", "/rerank"):
        answer = ranker.post(path, body).json()
        assert [r["index"] for r in answer["results"]] == order
        assert near([r["relevance_score"] for r in answer["results"]], [scores[n] for n in order])
        assert "document" not in answer["results"][0]
    texts = [{"text": d} for d in DOCUMENTS]
    named = ranker.post("/rerank", body | {"documents": texts, "return_documents": True}).json()
    assert named["results"][0]["document"]["text"] == DOCUMENTS[order[0]]
    assert len(ranker.post("/rerank", body | {"top_n": 0}).json()["results"]) == 3
    assert len(ranker.post("/rerank", body | {"top_n": 1}).json()["results"]) == 1
    tei = {"query": "capital of France", "texts": DOCUMENTS, "truncate": True, "return_text": True}
    found = ranker.post("/rerank", tei).json()
    assert [r["index"] for r in found] == order and found[0]["text"] == DOCUMENTS[order[0]]
    raw = ranker.post("/rerank", tei | {"raw_scores": True, "return_text": False}).json()
    assert near([r["score"] for r in raw], [logits[n] for n in order]) and "text" not in raw[0]
    score = ranker.post(
        "/score", {"text_1": "capital of France", "text_2": DOCUMENTS, "truncate_prompt_tokens": -1}
    )
    assert near([d["score"] for d in score.json()["data"]], scores)  # fmt: skip


def test_what_rerank_refuses(ranker: Server) -> None:
    body: dict[str, Any] = {"query": "x", "documents": ["y"]}
    refused(ranker, "/rerank", {"query": "x"}, "documents")
    refused(ranker, "/rerank", body | {"texts": ["y"]}, "documents")
    refused(ranker, "/rerank", body | {"documents": []}, "empty")
    refused(ranker, "/rerank", body | {"documents": ["y"] * 2049}, "2049")
    refused(ranker, "/rerank", body | {"truncate_prompt_tokens": 0}, "cut to 0 tokens")
    refused(ranker, "/rerank", body | {"raw_scores": True}, "raw_scores")
    refused(ranker, "/rerank", {"query": "x", "texts": ["y"], "top_n": 1}, "top_n")
    refused(ranker, "/rerank", {"query": "x", "texts": [LONG * 9]}, "texts[0]")
    refused(ranker, "/rerank", body | {"rank_fields": ["title"]}, "rank_fields")
    refused(ranker, "/score", {"text_1": ["a", "b"], "text_2": ["c"] * 3}, "as many")
    refused(ranker, "/score", {"text_1": "a"}, "text_2")
    refused(ranker, "/v1/embeddings", {"input": "x"}, "no embeddings")
    assert ranker.post("/rerank", body | {"max_tokens_per_doc": 1}).status_code == 200
    for bad in (-1, 2**64, "3", 1.5, True):
        refused(ranker, "/rerank", body | {"top_n": bad}, "top_n")


def test_classes_have_labels_and_probabilities(tmp_path: Path) -> None:
    folder = folders.classifier(tmp_path / "tiny", "xlm-roberta", labels=3)
    made = Oracle(folder)
    ids = made.tokenizer.encode("the cat").ids
    x = plain.bert(made.weights, made.config, ids, None, "roberta.")[0]
    x = np.tanh(plain.linear(made.weights, "classifier.dense", x))
    logits = plain.linear(made.weights, "classifier.out_proj", x)
    for server in serve(folder):
        (found,) = server.post("/classify", {"input": "the cat"}).json()["data"]
        assert near(found["probs"], plain.softmax(logits)) and found["num_classes"] == 3
        assert found["label"] == f"label {logits.argmax()}"
        (raw,) = server.post("/pooling", {"input": ["the cat"], "use_activation": False}).json()[
            "data"
        ]
        assert near(raw["data"], logits)
        refused(server, "/rerank", {"query": "x", "documents": ["y"]}, "3 labels", "/classify")


def test_a_decoder_judges_by_yes_and_no(tmp_path: Path) -> None:
    folder = folders.decoder(tmp_path / "tiny")
    made = Oracle(folder)
    known = made.tokenizer
    before = (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query "
        'and the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
        "<|im_start|>user\n"
    )
    after = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    task = "Given a web search query, retrieve relevant passages that answer the query"
    expected = []
    for document in DOCUMENTS[:2]:
        text = f"<Instruct>: {task}\n<Query>: France\n<Document>: {document}"
        ids = [i for part in (before, text, after) for i in known.encode(part).ids]
        logits = (
            plain.decoder(made.weights, made.config, ids)[-1]
            @ made.weights["embed_tokens.weight"].T
        )
        yes, no = (float(logits[known.token_to_id(word)]) for word in ("yes", "no"))
        expected.append(math.exp(yes) / (math.exp(yes) + math.exp(no)))
    for server in serve(folder, "--rerank"):
        body = {"text_1": "France", "text_2": DOCUMENTS[:2]}
        found = [d["score"] for d in server.post("/score", body).json()["data"]]
        assert np.abs(np.array(found) - expected).max() < 1e-3
        ranked = server.post("/rerank", {"query": "France", "documents": DOCUMENTS}).json()
        assert len(ranked["results"]) == 3


def test_a_decoder_gives_embeddings_when_asked(tmp_path: Path) -> None:
    folder = folders.decoder(tmp_path / "tiny")
    made = Oracle(folder)
    ids = made.tokenizer.encode("the cat").ids
    expected = plain.unit(plain.decoder(made.weights, made.config, ids)[-1])
    for server in serve(folder, "--embed"):
        assert near(embedded(server, input="the cat"), [expected])
        refused(server, "/v1/embeddings", {"input": ["a", ""]}, "input[1]", "empty")
        refused(server, "/v1/completions", {"prompt": "hi"}, "no text")
