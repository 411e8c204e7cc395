"""How well a model answers small questions, and what the loop guard does to its answers.

    python benchmarks/answers.py [--model MODEL] [--parts questions,loops]

Questions: ten with known answers, three seeds each, at temperature 0.2 and top_p 0.9, with the limits that
chat and the page set. Loops: random prompts are continued without the guard and with it. Every answer that
the guard ended is checked against the definition of a loop, token by token, in a second implementation.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import httpx
from common import child, default_model, free_port, wait_healthy
from rich.console import Console

from millrace.bench.words import WORDS
from millrace.cli.chat_limits import DEFAULT_MAX_TOKENS

SAMPLING = {"temperature": 0.2, "top_p": 0.9}
SEEDS = (1, 2, 3)
QUESTIONS = (
    ("What is the capital of France?", r"\bParis\b"),
    ("What is 2 + 3?", r"\b(5|five)\b"),
    ("How many days does a week have?", r"\b(7|seven)\b"),
    ("Which planet do we live on?", r"\bEarth\b"),
    ("What colour do you get when you mix blue and yellow?", r"\bgreen\b"),
    ("What is the opposite of hot?", r"\bcold\b"),
    ("Who wrote Romeo and Juliet?", r"\bShakespeare\b"),
    ("At what temperature in degrees Celsius does water boil?", r"\b100\b"),
    ("Which language is spoken in Brazil?", r"\bPortuguese\b"),
    ("What do bees make?", r"\bhoney\b"),
)
_PATIENCE = 3600.0


def main() -> None:
    options = _options()
    console = Console(highlight=False)
    model = options.model or str(default_model())
    port = free_port()
    command = [sys.executable, "-m", "millrace", "serve", model, "--port", str(port), "--only"]
    found: dict[str, Any] = {"model": Path(model).name}
    with (
        tempfile.TemporaryDirectory() as logs,
        child("millrace", [*command, "--store", "none"], logs=Path(logs), port=port) as server,
        httpx.Client(base_url=server.url, timeout=_PATIENCE, trust_env=False) as http,
    ):
        wait_healthy(server)
        if "questions" in options.parts:
            found["questions"] = _questions(http, console)
        if "loops" in options.parts:
            found["loops"] = _loops(http, console, options)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


def _questions(http: httpx.Client, console: Console) -> dict[str, Any]:
    asked = [(question, seed) for question, _ in QUESTIONS for seed in SEEDS]
    with ThreadPoolExecutor(len(asked)) as pool:
        answers = list(pool.map(lambda one: _answer(http, *one), asked))
    right = 0
    for at, (question, wanted) in enumerate(QUESTIONS):
        said = answers[at * len(SEEDS) : (at + 1) * len(SEEDS)]
        marks = [bool(re.search(wanted, a["text"], re.IGNORECASE)) for a in said]
        lengths = ", ".join(str(a["tokens"]) for a in said)
        console.print(f"  {sum(marks)} of {len(marks)}  {question}  ({lengths} tokens)")
        right += sum(marks)
    longest = max(a["tokens"] for a in answers)
    looped = sum(a["looped"] for a in answers)
    console.print(
        f"right: {right} of {len(asked)} ({right / len(asked):.0%}); ended by the loop guard: {looped}"
    )
    text = f"longest answer {longest} tokens, at most {DEFAULT_MAX_TOKENS}"
    _verdict(console, longest <= DEFAULT_MAX_TOKENS, text)
    return {"right": right, "asked": len(asked), "longest": longest, "looped": looped}


def _answer(http: httpx.Client, question: str, seed: int) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": question}], "seed": seed, **SAMPLING}
    body |= {"max_tokens": DEFAULT_MAX_TOKENS, "loop_guard": True}
    answer = _post(http, "/v1/chat/completions", body)
    choice = answer["choices"][0]
    return {
        "text": choice["message"]["content"],
        "tokens": answer["usage"]["completion_tokens"],
        "looped": "finish_details" in choice,
    }


def _loops(http: httpx.Client, console: Console, options: argparse.Namespace) -> dict[str, Any]:
    chance = Random(options.seed)
    prompts = [
        " ".join(chance.choices(WORDS, k=chance.randint(4, 40))) for _ in range(options.prompts)
    ]
    free = _continued(http, prompts, options, guard=False)
    guarded = _continued(http, prompts, options, guard=True)
    before = [_loops_at(a["output_ids"]) for a in free]
    cut = ["finish_details" in a["meta_info"]["finish_reason"] for a in guarded]
    after = [_loops_at(a["output_ids"]) for a in guarded]
    wrong = sum(
        c and at != len(a["output_ids"]) for c, at, a in zip(cut, after, guarded, strict=True)
    )
    missed = sum(not c and at is not None for c, at in zip(cut, after, strict=True))
    same = sum(
        g["output_ids"] == f["output_ids"][: len(g["output_ids"])]
        for f, g in zip(free, guarded, strict=True)
    )
    spent, kept = (sum(len(a["output_ids"]) for a in answers) for answers in (free, guarded))
    looped = sum(at is not None for at in before)
    console.print(
        f"{len(prompts)} random prompts, at most {options.tokens} tokens: {looped} loops before, "
        f"{missed} after; {sum(cut)} answers ended; {spent} tokens made before, {kept} after; "
        f"{same} answers begin as without the guard"
    )
    _verdict(console, wrong == 0, f"answers ended that did not loop: {wrong}")
    _verdict(console, missed == 0, f"loops that were not ended: {missed}")
    return {"prompts": len(prompts), "before": looped, "after": missed, "ended": sum(cut)} | {
        "wrong": wrong, "same": same, "tokens_before": spent, "tokens_after": kept,
    }  # fmt: skip


def _continued(
    http: httpx.Client, prompts: Sequence[str], options: argparse.Namespace, *, guard: bool
) -> list[dict[str, Any]]:
    params = [
        {**SAMPLING, "max_new_tokens": options.tokens, "sampling_seed": n, "loop_guard": guard}
        for n in range(len(prompts))
    ]
    body = {"text": list(prompts), "sampling_params": params}
    answers: list[dict[str, Any]] = _post(http, "/generate", body)
    return answers


def _loops_at(tokens: Sequence[int]) -> int | None:
    """How many tokens the answer has where its last 257 first have a period of at most 64."""
    runs = dict.fromkeys(range(1, 65), 0)
    for at, token in enumerate(tokens):
        for period in runs:
            repeats = at >= period and tokens[at - period] == token
            runs[period] = runs[period] + 1 if repeats else 0
            if runs[period] + period > 256 and runs[period]:
                return at + 1
    return None


def _post(http: httpx.Client, path: str, body: dict[str, Any]) -> Any:
    response = http.post(path, json=body)
    if response.status_code != 200:
        raise SystemExit(f"{path}: {response.status_code} {response.text}")
    return response.json()


def _verdict(console: Console, passed: bool, text: str) -> None:
    console.print(f"[{'green' if passed else 'red'}]{'PASS' if passed else 'FAIL'}[/] {text}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", help="a folder, file or name; the default model if left out")
    parser.add_argument("--parts", default="questions,loops", help="questions, loops, or both")
    parser.add_argument("--prompts", type=int, default=200, help="random prompts")
    parser.add_argument("--tokens", type=int, default=512, help="the most tokens of their answers")
    parser.add_argument("--seed", type=int, default=0, help="of the random prompts")
    parser.add_argument("--json", type=Path, help="a file for the figures")
    return parser.parse_args()


if __name__ == "__main__":
    main()
