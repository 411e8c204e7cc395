"""A worker under test: a server started with --smg, and the gateway's own stubs to call it with."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import httpx
from conftest import Server, free_port
from smg_grpc_proto.generated import (
    mlx_engine_pb2,
    mlx_engine_pb2_grpc,
    vllm_engine_pb2,
    vllm_engine_pb2_grpc,
)

vllm: Any = vllm_engine_pb2
mlx: Any = mlx_engine_pb2


@dataclass
class Answer:
    """One choice, as it was told."""

    tokens: list[int] = field(default_factory=list)
    chunks: list[Any] = field(default_factory=list)
    complete: Any = None


class Engine:
    """One of the two services."""

    def __init__(self, messages: Any, stub: Any) -> None:
        self.pb = messages
        self.stub = stub

    def request(
        self, prompt: Sequence[int] | str, *, id: str = "", stream: bool = False, **params: Any
    ) -> Any:
        params.setdefault("temperature", 0.0)
        if "skip_special_tokens" in self.pb.SamplingParams.DESCRIPTOR.fields_by_name:
            params.setdefault("skip_special_tokens", True)  # as the gateway always sends it
        wire = self.pb.GenerateRequest(request_id=id, stream=stream)
        if isinstance(prompt, str):
            wire.text = prompt
        else:
            wire.tokenized.input_ids.extend(prompt)
        wire.sampling_params.CopyFrom(self.pb.SamplingParams(**params))
        return wire

    def ask(self, prompt: Sequence[int] | str, timeout: float = 120, **said: Any) -> list[Answer]:
        """All choices of an answer, in order."""
        wire = self.request(prompt, **said)
        answers: dict[int, Answer] = defaultdict(Answer)
        for message in self.stub.Generate(wire, timeout=timeout):
            kind = message.WhichOneof("response")
            part = getattr(message, kind)
            answer = answers[part.index]
            assert answer.complete is None, "nothing follows a choice's last word"
            if kind == "chunk":
                assert wire.stream and part.token_ids
                answer.chunks.append(part)
                answer.tokens += part.token_ids
            else:
                assert not (wire.stream and part.output_ids)
                answer.complete = part
                answer.tokens += part.output_ids
        assert all(a.complete is not None for a in answers.values())
        return [answers[index] for index in sorted(answers)]

    def one(self, prompt: Sequence[int] | str, **said: Any) -> Answer:
        (answer,) = self.ask(prompt, **said)
        return answer

    def refused(self, prompt: Sequence[int] | str, **said: Any) -> grpc.StatusCode:
        """The code with which a request is turned away."""
        try:
            self.ask(prompt, **said)
        except grpc.RpcError as error:
            assert error.details()
            return error.code()
        raise AssertionError("it was not refused")


class Worker:
    def __init__(self, server: Server, port: int) -> None:
        self.server = server
        self.http: httpx.Client = server.http
        self.address = f"127.0.0.1:{port}"
        self.channel = grpc.insecure_channel(self.address)
        self.vllm = Engine(vllm, vllm_engine_pb2_grpc.VllmEngineStub(self.channel))
        self.mlx = Engine(mlx, mlx_engine_pb2_grpc.MlxEngineStub(self.channel))

    def tokens(self, said: str) -> list[int]:
        """A conversation's prompt, as the model's template writes it."""
        messages = [{"role": "user", "content": said}]
        return list(self.http.post("/tokenize", json={"messages": messages}).json()["tokens"])

    def ids(self, text: str) -> list[int]:
        body = {"prompt": text, "add_special_tokens": False}
        return list(self.http.post("/tokenize", json=body).json()["tokens"])

    def text(self, tokens: Sequence[int]) -> str:
        return str(self.http.post("/detokenize", json={"tokens": list(tokens)}).json()["text"])

    def chat(self, said: str, **wishes: Any) -> Any:
        """What the HTTP side answers to the same."""
        body = {"messages": [{"role": "user", "content": said}], "temperature": 0, **wishes}
        return self.http.post("/v1/chat/completions", json=body).json()["choices"][0]


@contextmanager
def serving(*args: str, **more: Any) -> Iterator[Worker]:
    port = free_port()
    server = Server(*args, "--smg", f"127.0.0.1:{port}", **more).wait_ready()
    worker = Worker(server, port)
    yield worker
    worker.channel.close()
    server.stop()
