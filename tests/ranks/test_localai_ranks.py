"""LocalAI's mlx-distributed: a model split over two workers, released, and loaded again."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from conftest import PYTHON, ROOT, ended, free_port
from rpc.localai_backend import Backend
from split_models import LONG, write

pytestmark = LONG

WIDE = {"num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 96}


def test_a_model_is_loaded_over_two_workers_released_and_loaded_again(tmp_path: Path) -> None:
    folder = write(tmp_path / "wide", "llama", **WIDE)
    hosts = tmp_path / "hosts.json"
    hosts.write_text(json.dumps([f"127.0.0.1:{_port()}" for _ in range(3)]))
    workers = [
        subprocess.Popen(
            [PYTHON, "-m", "millrace", "backend", "--worker", *_place(rank, hosts)],
            cwd=ROOT,
            stderr=subprocess.DEVNULL,
        )
        for rank in (1, 2)
    ]
    alone = Backend("--as", "mlx").wait_up()
    backend = Backend("--as", "mlx-distributed").wait_up()
    ask = {"Prompt": "Once upon a time", "Tokens": 24, "Temperature": 1.0, "Seed": 5}
    try:
        assert alone.client.LoadModel(Model=folder, EngineArgs='{"cache_disk": 0}').success
        expected = alone.client.Predict(**ask).message
        options = [f"hostfile:{hosts}", "distributed_backend:ring"]
        for _ in range(2):
            result = backend.client.LoadModel(Model=folder, Options=options)
            assert (result.success, result.message) == (True, "Model loaded successfully")
            assert backend.client.Predict(**ask).message == expected
            stream = list(backend.client.PredictStream(**ask))
            assert b"".join(part.message for part in stream) == expected
            assert backend.client.Free().success
            assert all(worker.poll() is None for worker in workers)
        missing = backend.client.LoadModel(Model=folder, Options=["hostfile:/nowhere.json"])
        assert not missing.success and "cannot be read" in missing.message
    finally:
        for each in (alone, backend):
            each.stop()
        assert [ended(worker, 30) for worker in workers] == [0, 0]


def _place(rank: int, hosts: Path) -> tuple[str, ...]:
    return ("--backend", "ring", "--hostfile", str(hosts), "--rank", str(rank))


def _port() -> int:
    """One whose neighbour for orders exists as well."""
    while (port := free_port()) > 60_000:
        continue
    return port
