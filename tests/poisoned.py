"""A model folder for tests of faults: the tiny llama of the load tests, with tokens that end it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from api import tiny_folder

ABORT, KILL, EXIT = 49151, 49150, 49149
"""As in tests/poisoned_model.py, which only an engine can import."""


def make(folder: Path, tokenizer_of: Path) -> Path:
    """Write the model into `folder`. Serve it with `--trust-remote-code`."""
    tiny_folder.make(folder, tokenizer_of)
    config = folder / "config.json"
    own = {"model_file": "poisoned_model.py", "eos_token_id": [2]}
    config.write_text(json.dumps(json.loads(config.read_text()) | own))
    shutil.copy(Path(__file__).with_name("poisoned_model.py"), folder)
    return folder


@contextmanager
def hold(folder: Path) -> Iterator[None]:
    """Meanwhile no answer of this model comes to its end: its engine stands still after some tokens."""
    file = folder.with_suffix(".hold")
    file.touch()
    try:
        yield
    finally:
        file.unlink()


def in_prompt(token: int, length: int = 40) -> dict[str, Any]:
    """A completion whose prompt ends the engine."""
    prompt = [7 + i for i in range(length)]
    return {"prompt": [*prompt, token, *prompt], "max_tokens": 8, "temperature": 0}


def in_answer(token: int) -> dict[str, Any]:
    """A completion that ends the engine as soon as it has generated a token."""
    bias = {str(token): 100}
    return {"prompt": [5, 6, 7], "max_tokens": 8, "temperature": 0, "logit_bias": bias}


def healthy(number: int, tokens: int) -> dict[str, Any]:
    """A completion that generates so many tokens, none of them an order."""
    prompt = [300 + (number * 37 + i * 11) % 900 for i in range(20 + number)]
    return {
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0.8 if number % 2 else 0.0,
        "seed": number,
        "ignore_eos": True,
        "logit_bias": {str(token): -100 for token in (ABORT, KILL, EXIT)},
    }
