"""Workers of other kinds: one that makes embeddings, and one with keys whose model speaks in channels."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest
import scripted
from models import encoder_folders as folders
from rpc.smg.worker_calls import Worker, serving, vllm
from scripted import Rule, call, think

KEY = "sk-worker"
METADATA = (("authorization", f"Bearer {KEY}"),)
RULES = [
    Rule("weather", call("get_weather", "harmony", city="Paris")),
    Rule("", think("They greet.", "Hello.", "harmony")),
]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    folder = folders.encoder(tmp_path_factory.mktemp("smg") / "tiny")
    pooling = ("Pooling", "1_Pooling", {"pooling_mode": "mean"})
    folder = folders.sentence(folder, modules=[pooling, ("Normalize", "2_Normalize", {})])
    with serving(str(folder), "--name", "tiny") as found:
        yield found


def test_embeddings_are_those_of_http(encoder: Worker) -> None:
    ids = encoder.ids("the cat sat")
    told = encoder.vllm.stub.Embed(vllm.EmbedRequest(tokenized={"input_ids": ids}))
    body = {"input": ids}
    ours = encoder.http.post("/v1/embeddings", json=body).json()["data"][0]["embedding"]
    assert np.allclose(told.embedding, ours, atol=1e-6)
    assert (told.embedding_dim, told.prompt_tokens) == (len(ours), len(ids))
    info = encoder.vllm.stub.GetModelInfo(vllm.GetModelInfoRequest())
    assert not info.is_generation


def test_what_an_encoder_cannot_do_is_an_invalid_argument(encoder: Worker) -> None:
    invalid = grpc.StatusCode.INVALID_ARGUMENT
    assert encoder.vllm.refused(encoder.ids("the cat sat")) is invalid
    for ids in ([], [2**32 - 1], [1] * 100_000):
        with pytest.raises(grpc.RpcError) as caught:
            encoder.vllm.stub.Embed(vllm.EmbedRequest(tokenized={"input_ids": ids}))
        assert caught.value.code() is invalid


@pytest.fixture(scope="module")
def harmony(tmp_path_factory: pytest.TempPathFactory, default_model: Path) -> Iterator[Worker]:
    made = tmp_path_factory.mktemp("smg") / "harmony"
    folder = scripted.make(made, default_model, RULES, "harmony")
    options = ("--trust-remote-code", "--api-key", KEY, "--rate-requests", "60")
    with serving(str(folder), "--name", "harmony", *options) as found:
        found.http.headers["authorization"] = f"Bearer {KEY}"
        yield found


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("say", "end"), [("weather", "<|call|>"), ("hello", "<|return|>")])
def test_what_ends_a_message_in_channels_is_sent_and_is_no_matched_stop(
    harmony: Worker, say: str, end: str, stream: bool
) -> None:
    ids = [harmony.ids(mark)[0] for mark in ("<|return|>", "<|call|>")]
    wire = harmony.vllm.request(harmony.tokens(say), stream=stream, stop_token_ids=ids)
    told = list(harmony.vllm.stub.Generate(wire, metadata=METADATA))
    complete = told[-1].complete
    tokens = [t for m in told for t in (*m.chunk.token_ids, *m.complete.output_ids)]
    assert [tokens[-1]] == harmony.ids(end)
    assert complete.WhichOneof("matched_stop") is None
    assert complete.completion_tokens == len(tokens)


def test_a_server_with_keys_wants_one_for_all_but_health(harmony: Worker) -> None:
    stub = harmony.vllm.stub
    assert stub.HealthCheck(vllm.HealthCheckRequest()).healthy
    wrong = (("x-api-key", "nobody"),)
    for metadata in ((), wrong):
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.Generate(harmony.vllm.request([1, 2]), metadata=metadata))
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        with pytest.raises(grpc.RpcError) as caught:
            stub.GetModelInfo(vllm.GetModelInfoRequest(), metadata=metadata)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert stub.GetModelInfo(vllm.GetModelInfoRequest(), metadata=METADATA).vocab_size


def test_a_caller_is_held_to_its_rate_by_both_doors(harmony: Worker) -> None:
    stub = harmony.vllm.stub
    with pytest.raises(grpc.RpcError) as caught:
        for _ in range(80):
            wire = harmony.vllm.request([1, 2], max_tokens=1)
            list(stub.Generate(wire, metadata=METADATA))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert harmony.http.post("/generate", json={"text": "x"}).status_code == 429
