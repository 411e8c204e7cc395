"""A fingerprint changes with whatever changes the state of a model, and with nothing else."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from millrace.cache.disk import fingerprint


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 64}))
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "code.py").write_text("x = 1\n")
    for name in ("model-1.safetensors", "model-2.safetensors"):
        save_file({"w": np.arange(100_000, dtype=np.float32)}, tmp_path / name)
    return tmp_path


def _of(model: Path, dtype: str = "bfloat16", layout: str = "kv", **versions: str) -> str:
    return fingerprint(model, dtype=dtype, layout=layout, versions={"mlx": "1", **versions})


def _rewrite(path: Path, data: bytes) -> None:
    """Other content with the same size and time."""
    stat = path.stat()
    path.write_bytes(data)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def test_it_is_stable(model: Path) -> None:
    first = _of(model)
    (model / "tokenizer.json").write_text('{"other": 1}')
    (model / "README.md").write_text("words")
    assert _of(model) == first and len(first) == 64 and int(first, 16)


def test_everything_that_matters_changes_it(model: Path) -> None:
    seen = {_of(model), _of(model, dtype="float16"), _of(model, layout="8-bit")}
    seen |= {_of(model, mlx="2"), _of(model, other="1")}
    (model / "config.json").write_text(json.dumps({"hidden_size": 65}))
    seen.add(_of(model))
    (model / "code.py").write_text("x = 2\n")
    seen.add(_of(model))
    weights = model / "model-1.safetensors"
    data = bytearray(weights.read_bytes())
    for at in (12, len(data) // 2 // 4 * 4, len(data) - 1):
        # The samples of a small file cover all regions, not all bytes.
        data[max(at - 15_000, 0) : at + 15_000] = bytes(
            len(data[max(at - 15_000, 0) : at + 15_000])
        )
        _rewrite(weights, bytes(data))
        seen.add(_of(model))
    os.utime(weights, ns=(1, 1))
    seen.add(_of(model))
    weights.rename(model / "model-3.safetensors")
    seen.add(_of(model))
    (model / "model-2.safetensors").unlink()
    seen.add(_of(model))
    assert len(seen) == 13


def test_a_large_model_costs_milliseconds(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for i in range(20):
        with (tmp_path / f"model-{i}.safetensors").open("wb") as file:
            head = json.dumps({"w": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}).encode()
            file.write(len(head).to_bytes(8, "little") + head)
            file.truncate(5 << 30)  # sparse
    began = time.thread_time()
    _of(tmp_path)
    assert time.thread_time() - began < 5  # a hundred gigabytes would take far longer


def test_links_are_followed(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "linked"
    folder.mkdir()
    for name in ("config.json", "code.py", "model-1.safetensors", "model-2.safetensors"):
        (folder / name).symlink_to(model / name)
    before = _of(folder)
    _rewrite(model / "model-1.safetensors", bytes((model / "model-1.safetensors").stat().st_size))
    assert _of(folder) != before
