"""A `millrace backend` process as LocalAI starts it, and a plain gRPC client made from our proto."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

import grpc
from conftest import PATIENCE, PYTHON, ended, free_port

from millrace.rpc.localai import wire

NO_DISK = '{"cache_disk": 0}'
"""Engine arguments of every test: what one leaves on disk, no other finds."""


class Client:
    """The service's methods by their names: `client.Predict(Prompt="…")`."""

    def __init__(self, address: str, token: str | None = None) -> None:
        size = 50 << 20
        self.channel = grpc.insecure_channel(
            address,
            options=[
                ("grpc.max_send_message_length", size),
                ("grpc.max_receive_message_length", size),
                # While it starts, to ask again is cheap.
                ("grpc.initial_reconnect_backoff_ms", 100),
                ("grpc.max_reconnect_backoff_ms", 500),
            ],
        )
        self._metadata = [("authorization", f"Bearer {token}")] if token is not None else None
        self._methods = {method.name: method for method in wire.METHODS}

    def __getattr__(self, name: str) -> Any:
        method = self._methods[name]
        kind = self.channel.unary_stream if method.streams else self.channel.unary_unary
        called = kind(
            f"/{wire.SERVICE}/{name}",
            request_serializer=method.request.SerializeToString,
            response_deserializer=method.answer.FromString,
        )

        def call(message: Any = None, /, timeout: float = 120, **fields: Any) -> Any:
            request = method.request(**fields) if message is None else message
            return called(request, timeout=timeout, metadata=self._metadata)

        return call

    def begun(self, name: str, **fields: Any) -> Any:
        """A call of one answer under way: it can be waited for, or cancelled."""
        method = self._methods[name]
        called = self.channel.unary_unary(
            f"/{wire.SERVICE}/{name}",
            request_serializer=method.request.SerializeToString,
            response_deserializer=method.answer.FromString,
        )
        return called.future(method.request(**fields), timeout=120, metadata=self._metadata)

    def raw(self, name: str, body: bytes) -> bytes:
        called = self.channel.unary_unary(f"/{wire.SERVICE}/{name}")
        return bytes(called(body, timeout=60, metadata=self._metadata))


class Backend:
    def __init__(self, *args: str, env: dict[str, str] | None = None) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self.process = subprocess.Popen(
            [PYTHON, "-m", "millrace", "backend", f"--addr={self.address}", *args],
            env=os.environ | (env or {}),
            stdout=subprocess.DEVNULL,
            stderr=self._log,
        )
        self.client = Client(self.address, (env or {}).get("LOCALAI_GRPC_AUTH_TOKEN"))

    def wait_up(self, timeout: float = PATIENCE) -> Backend:
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(f"the backend ended: {self.log()}")
            try:
                assert self.client.Health(timeout=5).message == b"OK"
                return self
            except grpc.RpcError:
                time.sleep(0.05)
        raise TimeoutError(self.log())

    def load(self, model: str, **fields: Any) -> Any:
        fields = {"EngineArgs": NO_DISK} | fields
        return self.client.LoadModel(Model=model, timeout=240, **fields)

    def loaded(self, model: str, **fields: Any) -> Backend:
        result = self.load(model, **fields)
        assert result.success, result.message
        return self

    def engines(self) -> list[int]:
        """The processes of its engines."""
        listed = subprocess.run(
            ["ps", "-eo", "pid=,ppid=,args="], capture_output=True, text=True, check=True
        )
        rows = [line.split(None, 2) for line in listed.stdout.splitlines()]
        mine = {r[0] for r in rows if r[1] == str(self.process.pid)}
        return [int(r[0]) for r in rows if r[1] in mine and "millrace.engine" in r[2]]

    def kill_engine(self) -> None:
        for pid in self.engines():
            os.kill(pid, signal.SIGKILL)

    def log(self) -> str:
        file = self._log.fileno()
        return os.pread(file, os.fstat(file).st_size, 0).decode(errors="replace")

    def stop(self, timeout: float = PATIENCE) -> int:
        self.client.channel.close()
        return ended(self.process, timeout)


def text_of(replies: Sequence[Any] | Iterator[Any]) -> str:
    return b"".join(reply.message for reply in replies).decode()


def refused(call: Any, *args: Any, **fields: Any) -> tuple[grpc.StatusCode, str]:
    """The status that a call ends with."""
    try:
        answer = call(*args, **fields)
        if hasattr(answer, "__next__"):
            list(answer)
    except grpc.RpcError as error:
        return error.code(), error.details() or ""
    raise AssertionError(f"it was answered: {answer}")
