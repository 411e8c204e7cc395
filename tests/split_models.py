"""Tiny models as folders that servers can split over ranks, and what is asked of them."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import tiny
import tiny_tokenizer
from conftest import Server
from mlx.utils import tree_flatten

LONG = pytest.mark.skipif("MILLRACE_SPLIT_TESTS" not in os.environ, reason="run `make test-ranks`")
"""Of tests that take minutes."""
MOE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}


def write(folder: Path, shape: str, **more: Any) -> str:
    """A random model and its tokenizer; returns the folder."""
    more = {"vocab_size": tiny_tokenizer.WORDS} | more
    model = tiny.build(shape, **more)
    tiny_tokenizer.write(folder)
    (folder / "config.json").write_text(json.dumps(tiny.settings(shape, **more)))
    arrays = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), arrays, metadata={"format": "mlx"})
    return str(folder)


_SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "yy"]}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
_STORY = (
    "Once upon a time there was a mill by the river, and the river was wide and the mill was old. "
)


def mixed(tokens: int = 24, stop: str = "e") -> list[dict[str, Any]]:
    """Eight requests, each with another wish."""
    base: dict[str, Any] = {"prompt": _STORY + "The miller", "max_tokens": tokens, "temperature": 0}
    return [
        base,
        base | {"temperature": 1, "seed": 7},
        base | {"prompt": _STORY * 3, "temperature": 1, "seed": 11, "top_p": 0.8, "top_k": 30},
        base | {"prompt": "A river", "stop": [stop]},
        base | {"prompt": "Answer:", "response_format": _format(), "max_tokens": 60},
        base | {"prompt": "Numbers", "logprobs": 3, "temperature": 0.7, "seed": 3, "n": 2},
        base | {"prompt": _STORY, "frequency_penalty": 0.8, "repetition_penalty": 1.2},
        base | {"prompt": "Letters", "logit_bias": {"70": 4.0, "71": -100.0}, "min_p": 0.01},
    ]


def _format() -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": _SCHEMA, "strict": True}}


def answers(server: Server, bodies: list[dict[str, Any]]) -> list[Any]:
    """What all of them bring, asked at once: texts, reasons and rounded logprobs."""
    with ThreadPoolExecutor(len(bodies)) as pool:
        return list(pool.map(lambda body: _answer(server, body), bodies))


def _answer(server: Server, body: dict[str, Any]) -> Any:
    response = server.post("/v1/completions", body)
    assert response.status_code == 200, response.text
    found = []
    for choice in response.json()["choices"]:
        scores = choice.get("logprobs") or {}
        rounded = [round(p, 3) for p in scores.get("token_logprobs") or []]
        found.append((choice["text"], choice["finish_reason"], rounded))
    return found


def abandon(server: Server) -> None:
    """A stream that its reader leaves after some tokens."""
    body = {"prompt": _STORY, "max_tokens": 400, "stream": True, "ignore_eos": True}
    with server.http.stream("POST", "/v1/completions", json=body) as stream:
        for number, _ in enumerate(stream.iter_lines()):
            if number > 6:
                return


def ranks(server: Server) -> list[dict[str, Any]]:
    return list(server.status()["ranks"])
