"""PyPI's `smg` as its users start it, with a log of its own, and workers to stand behind it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
from conftest import Server, free_port

SMG = Path(sys.executable).with_name("smg")


class WorkerServer(Server):
    """A `millrace serve` with a worker's port, another's if one is to be replaced."""

    def __init__(self, *args: str, worker: str = "", **more: Any) -> None:
        self.worker = worker or f"127.0.0.1:{free_port()}"
        super().__init__(*args, "--smg", self.worker, **more)


class Gateway:
    def __init__(
        self,
        workers: Sequence[WorkerServer],
        *args: str,
        smg: Path = SMG,
        env: dict[str, str] | None = None,
    ) -> None:
        port, metrics = free_port(), free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.metrics_url = f"http://127.0.0.1:{metrics}/metrics"
        self.http = httpx.Client(base_url=self.url, timeout=120)
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self.process = subprocess.Popen(
            [
                *(str(smg), "launch", "--host", "127.0.0.1", "--port", str(port)),
                *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics)),
                *("--worker-startup-check-interval", "1", "--health-check-interval-secs", "1"),
                *("--worker-urls", *(f"grpc://{w.worker}" for w in workers)),
                *args,
            ],
            env=os.environ | (env or {}),
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        self._count = len(workers)

    def wait_ready(self, timeout: float = 120) -> Gateway:
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(f"the gateway ended: {self.log()}")
            try:
                found = self.http.get("/workers").json().get("workers", [])
                if sum(w["is_healthy"] for w in found) == self._count and self._answers(found):
                    return self
            except (httpx.TransportError, ValueError):
                pass
            time.sleep(0.1)
        raise TimeoutError(f"the gateway does not see its workers: {self.log()[-3000:]}")

    def _answers(self, workers: list[Any]) -> bool:
        """Whether it has the workers' tokenizer, which it fetches once it knows them."""
        body = {"model": workers[0]["model_id"], "prompt": "1", "max_tokens": 1}
        return self.http.post("/v1/completions", json=body).status_code != 503

    def log(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    def metrics(self, name: str) -> dict[str, float]:
        """The series of one metric, by their labels."""
        text = httpx.get(self.metrics_url).text
        lines = [line for line in text.splitlines() if line.startswith(name)]
        return {key: float(value) for key, value in (line.rsplit(" ", 1) for line in lines)}

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
