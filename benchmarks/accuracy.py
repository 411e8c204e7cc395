"""Our own kernels on a CPU beside MLX's float32, on one model: what a text costs, and what is answered.

    python benchmarks/accuracy.py [--model FOLDER] [--text FILE]

The logprob of each of 2,000 tokens of a text is held to float32's, and the perplexity of them all. Then
fifty short prompts are continued greedily by both; where the texts part, the two words at that place must
be nearly as likely as each other in float32.
"""

from __future__ import annotations

import argparse
import platform
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from common import HERE, default_model
from rich.console import Console

from millrace.models import blas

blas.prepare()

import mlx.core as mx  # noqa: E402
from mlx_lm.models.cache import make_prompt_cache  # noqa: E402
from mlx_lm.utils import load_model  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402

from millrace.models import placement  # noqa: E402

CHUNK = 250
LOGPROB_AT_MOST, PERPLEXITY_AT_MOST, TIE_AT_MOST = 2e-3, 1e-3, 2e-3
THINGS = (
    "the sea", "a red door", "my brother", "the moon", "water", "an old book", "the city", "a bird",
    "music", "the number seven",
)  # fmt: skip
BEGINNINGS = (
    "Once upon a time there was", "The capital of France is", "To make bread you need",
    "def add(a, b):\n    return", "Dear friend, I write to you about",
)  # fmt: skip


def main() -> None:
    options = _options()
    console = Console()
    folder = options.model or default_model()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokens = tokenizer.encode(options.text.read_text()).ids[: options.tokens]
    models = {name: _load(folder, name) for name in ("auto", "f32")}
    console.print(f"{platform.machine()}, {len(tokens)} tokens of {options.text.name}", style="dim")
    ours, theirs = (_logprobs(model, tokens) for model in models.values())
    _verdict(
        console, "largest difference of a logprob", np.abs(ours - theirs).max(), LOGPROB_AT_MOST
    )
    ratio = abs(np.exp(theirs.mean() - ours.mean()) - 1)
    _verdict(console, "difference of the perplexity", ratio, PERPLEXITY_AT_MOST)
    begin = time.monotonic()
    parted, worst = 0, 0.0
    for start in BEGINNINGS:
        for thing in THINGS:
            prompt = tokenizer.encode(f"About {thing}. {start}").ids
            distance = _part(models["auto"], models["f32"], prompt, options.out)
            parted += distance is not None
            worst = max(worst, distance or 0.0)
    _verdict(console, f"{parted} of 50 texts part, at words that differ by", worst, TIE_AT_MOST)
    console.print(f"{time.monotonic() - begin:.0f} s", style="dim")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, help="an MLX model folder (default: millrace's own)")
    parser.add_argument("--text", type=Path, default=HERE.parent / "docs" / "api.md")
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--out", type=int, default=32)
    return parser.parse_args()


def _load(folder: Path, weights: str) -> Any:
    model, _ = load_model(folder, lazy=True)
    return placement.place(model, weights, "cpu", folder)  # type: ignore[arg-type]


def _logprobs(model: Any, tokens: list[int]) -> npt.NDArray[np.float64]:
    """Of each token after the first, given those before it."""
    cache = make_prompt_cache(model)
    scores = []
    for start in range(0, len(tokens) - 1, CHUNK):
        run = tokens[start : min(start + CHUNK, len(tokens) - 1)]
        found = np.array(model(mx.array([run]), cache=cache).astype(mx.float32))[0]
        found = found.astype(np.float64)
        found -= found.max(axis=-1, keepdims=True)
        found -= np.log(np.exp(found).sum(axis=-1, keepdims=True))
        scores.append(found[np.arange(len(run)), tokens[start + 1 : start + 1 + len(run)]])
    return np.concatenate(scores)


def _part(ours: Any, theirs: Any, prompt: list[int], out: int) -> float | None:
    """Where greedy texts part, how much likelier float32 finds its own word, in log; None if nowhere."""
    caches = make_prompt_cache(ours), make_prompt_cache(theirs)
    run = prompt
    for _ in range(out):
        left, right = (
            np.array(model(mx.array([run]), cache=cache)[0, -1].astype(mx.float32))
            for model, cache in zip((ours, theirs), caches, strict=True)
        )
        if left.argmax() != right.argmax():
            return float(right.max() - right[left.argmax()])
        run = [int(right.argmax())]
    return None


def _verdict(console: Console, name: str, value: float, most: float) -> None:
    word = "[green]PASS[/]" if value <= most else "[red]FAIL[/]"
    console.print(f"{word} {name}: {value:.2e} (at most {most:g})", highlight=False)


if __name__ == "__main__":
    main()
