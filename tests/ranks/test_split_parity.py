"""Models of several shapes on several ranks answer token for token as on one, through HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import Server
from split_models import LONG, MOE, abandon, answers, mixed, ranks, write

pytestmark = LONG

SHAPES: dict[str, tuple[str, dict[str, Any], list[tuple[str, ...]]]] = {
    "qwen3": (
        "qwen3",
        {"num_hidden_layers": 3},
        [("2", "tensor"), ("2", "pipeline"), ("3", "pipeline")],
    ),
    "experts": ("qwen3_moe", MOE | {"num_hidden_layers": 3}, [("2", "tensor"), ("3", "pipeline")]),
    "sliding": ("gpt_oss", {}, [("2", "auto")]),
}


@pytest.mark.parametrize("name", list(SHAPES))
def test_ranks_answer_as_one_process_does(name: str, tmp_path: Path) -> None:
    shape, more, splits = SHAPES[name]
    folder = write(tmp_path / name, shape, **more)
    whole = Server(folder).wait_ready()
    expected = answers(whole, mixed())
    whole.stop()
    for count, how in splits:
        split = Server(folder, "--ranks", count, "--parallel", how).wait_ready()
        try:
            _answers_alike(split, expected, mixed())
        finally:
            split.stop()


def test_the_default_model_on_three_ranks(default_model: Path) -> None:
    """It has three key-value heads."""
    bodies = mixed(tokens=12, stop=" the")
    whole = Server().wait_ready()
    expected = answers(whole, bodies)
    whole.stop()
    split = Server("--ranks", "3", "--parallel", "tensor").wait_ready()
    try:
        _answers_alike(split, expected, bodies)
        told = ranks(split)
        total = whole_bytes(default_model)
        for rank in told:
            print("rank", rank["rank"], "weights", rank["weight_bytes"], "peak", rank["peak_bytes"])
            assert rank["weight_bytes"] <= total / 3 * 1.25 + EMBEDDING
            assert rank["peak_bytes"] <= total / 3 * 1.25 + EMBEDDING + PROCESS
    finally:
        split.stop()


EMBEDDING = 49152 * 576 * 9 // 8
"""Bytes of the default model's embedding, which every rank has: 8 bits, a scale and a bias for 32."""
PROCESS = 384 << 20
"""What a process takes beside weights: Python, MLX, buffers, a prefix cache and the state of requests."""


def whole_bytes(folder: Path) -> int:
    return sum(f.stat().st_size for f in folder.glob("model*.safetensors"))


def _answers_alike(server: Server, expected: list[Any], bodies: list[dict[str, Any]]) -> None:
    assert answers(server, bodies) == expected
    abandon(server)
    assert answers(server, bodies) == expected
    usage = server.post("/v1/completions", bodies[0]).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] > 0
    assert server.status()["restarts"] == 0, server.log()
    assert all(r["state"] == "ready" for r in ranks(server))
