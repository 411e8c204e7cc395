"""SpecPrefill: time to the first token of a long prompt with it and without, what running streams feel of
it, how fast decoding is after it, and whether a needle in the prompt is still found.

Model and draft are GGUF files or folders (`--model`, `--draft`). Dense and sparse prompts take turns on one
server, each prompt with words of its own so that no cache helps. The needle test has the draft as its own
model: a sentence with a number at ten places of a long text, asked for at the end (`--places 0 5` looks
for the first five of them).
`python benchmarks/specprefill.py --model FILE --draft FILE [--only ttft gaps decode needle]`
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import httpx
from common import Child, child, free_port, wait_healthy, warn_if_busy
from rich.console import Console
from rich.table import Table

from millrace.bench.words import WORDS

TTFT_AT_MOST, GAP_AT_MOST, DECODE_AT_LEAST, FOUND_AT_LEAST = 0.6, 3.0, 0.98, 0.9
PLACES = 10
PARTS = ("ttft", "gaps", "decode", "needle")
_PATIENCE = 1200.0


class Asker:
    def __init__(self, server: Child, keep: float) -> None:
        self._http = httpx.Client(base_url=server.url, timeout=_PATIENCE, trust_env=False)
        self._keep = keep

    def body(self, messages: list[dict[str, str]], tokens: int, *, sparse: bool) -> dict[str, Any]:
        return {
            "messages": messages,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": tokens > 1,
            "stream": True,
            "stream_options": {"include_usage": True},
            "specprefill": sparse,
        } | ({"specprefill_keep_pct": self._keep} if sparse else {})

    def times(
        self,
        messages: list[dict[str, str]],
        tokens: int,
        *,
        sparse: bool,
        until: threading.Event | None = None,
    ) -> Answer:
        """When each piece of an answer came, counted from the request; no more of it is waited for once
        `until` is set."""
        begin = time.perf_counter()
        answer = Answer()
        asked = self.body(messages, tokens, sparse=sparse)
        with self._http.stream("POST", "/v1/chat/completions", json=asked) as response:
            for line in response.iter_lines():
                if until is not None and until.is_set():
                    break
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise SystemExit(f"the server said: {event['error']['message']}")
                if event.get("usage"):
                    answer.prompt = event["usage"]["prompt_tokens"]
                for choice in event["choices"]:
                    if piece := choice["delta"].get("content"):
                        answer.at.append(time.perf_counter() - begin)
                        answer.text += piece
        return answer

    def kept(self) -> float:
        for line in self._http.get("/metrics").text.splitlines():
            if line.startswith("millrace_specprefill_tokens_total") and 'kind="kept"' in line:
                return float(line.split()[-1])
        return 0.0


class Answer:
    def __init__(self) -> None:
        self.at: list[float] = []
        self.text = ""
        self.prompt = 0

    @property
    def gaps(self) -> list[float]:
        return [b - a for a, b in zip(self.at, self.at[1:], strict=False)]


def prose(tokens: int, seed: int) -> str:
    """Sentences of common words, about so many tokens."""
    dice = random.Random(seed)
    lines: list[str] = []
    count = 0
    while count < tokens:
        words = [dice.choice(WORDS) for _ in range(dice.randrange(7, 15))]
        count += int(1.07 * len(words)) + 1
        lines.append(" ".join(words).capitalize() + ".")
    return " ".join(lines)


def long_prompt(tokens: int, seed: int) -> list[dict[str, str]]:
    return [
        {"role": "system", "content": "You answer questions about a text."},
        {"role": "user", "content": prose(tokens, seed)},
        {"role": "assistant", "content": "I have read it."},
        {"role": "user", "content": "Which words occur most often? Name three of them."},
    ]


def needle_prompt(tokens: int, place: int, number: int) -> list[dict[str, str]]:
    text = prose(tokens, seed=place).split(". ")
    at = int(len(text) * (place + 0.5) / PLACES)
    text.insert(at, f"The secret number of the lighthouse is {number}")
    question = "What is the secret number of the lighthouse? Answer with the number alone."
    return [
        {"role": "system", "content": "You answer questions about a text."},
        {"role": "user", "content": ". ".join(text)},
        {"role": "assistant", "content": "I have read it."},
        {"role": "user", "content": question},
    ]


def ttft(asker: Asker, tokens: int, rounds: int) -> dict[str, Any]:
    found: dict[bool, list[float]] = {False: [], True: []}
    length = 0
    before = asker.kept()
    for number in range(rounds):
        for sparse in (False, True):
            answer = asker.times(long_prompt(tokens, 10 * number + sparse), 1, sparse=sparse)
            found[sparse].append(answer.at[0])
            length = answer.prompt
            way = "sparse" if sparse else "dense"
            print(f"{way}, {length} tokens: {answer.at[0]:.1f} s", flush=True)
    dense, sparse_ = (statistics.median(found[way]) for way in (False, True))
    kept = (asker.kept() - before) / rounds
    return {
        "tokens": length,
        "kept": kept,
        "dense": dense,
        "sparse": sparse_,
        "ratio": sparse_ / dense,
    }


def gaps(asker: Asker, tokens: int, streams: int) -> dict[str, Any]:
    """The 99th percentile of running streams' gaps while a long prompt is scored and run, over that
    before it came."""
    answers = [Answer() for _ in range(streams)]
    over = threading.Event()
    begin = time.perf_counter()

    def run(number: int) -> None:
        question = [{"role": "user", "content": f"Tell story number {number} about the sea."}]
        answers[number] = asker.times(question, 4000, sparse=False, until=over)
        answers[number].at = [at + shift[number] for at in answers[number].at]

    shift = [0.0] * streams
    threads = []
    for number in range(streams):
        shift[number] = time.perf_counter() - begin
        threads.append(threading.Thread(target=run, args=(number,)))
        threads[-1].start()
    time.sleep(12.0)
    came = time.perf_counter() - begin
    first = came + asker.times(long_prompt(tokens, 77), 1, sparse=True).at[0]
    over.set()
    for thread in threads:
        thread.join()
    quiet, beside = [], []
    for answer in answers:
        for a, b in zip(answer.at, answer.at[1:], strict=False):
            if a > 3.0 and b < came:
                quiet.append(b - a)
            elif a > came and b < first:
                beside.append(b - a)
    if any(answer.at[-1] < first - 5.0 for answer in answers):
        raise SystemExit("the streams ended before the long prompt did; ask for a shorter one")
    one, two = (sorted(part)[int(0.99 * (len(part) - 1))] for part in (quiet, beside))
    return {
        "quiet": one,
        "beside": two,
        "ratio": two / one,
        "gaps": len(beside),
        "longest": max(beside),
        "first": first - came,
    }


def decode(asker: Asker, tokens: int, rounds: int) -> dict[str, Any]:
    """Tokens a second after a sparse prompt over those after a dense one with as much state."""
    speeds: dict[bool, list[float]] = {False: [], True: []}
    for number in range(rounds):
        before = asker.kept()
        sparse = asker.times(long_prompt(tokens, 500 + number), 48, sparse=True)
        kept = int(asker.kept() - before) or sparse.prompt
        dense = asker.times(long_prompt(kept, 600 + number), 48, sparse=False)
        for way, answer in ((True, sparse), (False, dense)):
            speeds[way].append(1 / statistics.median(answer.gaps[4:]))
    found = {way: statistics.median(speeds[way]) for way in speeds}
    return {"dense": found[False], "sparse": found[True], "ratio": found[True] / found[False]}


def needle(asker: Asker, tokens: int, places: range) -> dict[str, Any]:
    """Those that are not found are looked for in the whole prompt, too: the model may not be able to."""
    each: dict[int, str] = {}
    for place in places:
        number = 10_000 + 7919 * (place + 1) % 90_000
        asked = needle_prompt(tokens, place, number)
        said = ""
        for sparse in (True, False):
            answer = asker.times(asked, 12, sparse=sparse)
            way = "sparse" if sparse else "dense"
            print(f"place {place}, {answer.prompt} tokens, {way}: {answer.text!r}", flush=True)
            said = way if str(number) in answer.text else "not at all"
            if said == way:
                break
        each[place] = said
    found = sum(way == "sparse" for way in each.values())
    return {"found": found, "places": len(each), "each": each, "share": found / len(each)}


def serve(model: str, draft: str, logs: Path) -> Any:
    port = free_port()
    command = [sys.executable, "-m", "millrace", "serve", model, "--specprefill-draft", draft]
    command += ["--only", "--cache-disk", "0", "--store", "none", "--speculate", "0"]
    name = f"server {Path(model).name}"
    return child(name, [*command, "--port", str(port)], logs=logs, port=port)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--tokens", type=int, default=6000)
    parser.add_argument("--needle-tokens", type=int, default=3000)
    parser.add_argument(
        "--places", type=int, nargs=2, default=(0, PLACES), metavar=("FIRST", "END")
    )
    parser.add_argument("--keep", type=float, default=0.2)
    parser.add_argument("--needle-keep", type=float, default=0.3)
    parser.add_argument("--streams", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    console = Console()
    warn_if_busy(console)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        logs = Path(folder)
        if {"ttft", "gaps", "decode"} & set(given.only):
            with serve(given.model, given.draft, logs) as server:
                wait_healthy(server, 600)
                asker = Asker(server, given.keep)
                asker.times([{"role": "user", "content": "Hello."}], 8, sparse=False)
                if "ttft" in given.only:
                    results["ttft"] = ttft(asker, given.tokens, given.rounds)
                    console.print("ttft", results["ttft"])
                if "decode" in given.only:
                    results["decode"] = decode(asker, given.tokens, given.rounds)
                    console.print("decode", results["decode"])
                if "gaps" in given.only:
                    results["gaps"] = gaps(asker, given.tokens, given.streams)
                    console.print("gaps", results["gaps"])
        if "needle" in given.only:
            with serve(given.draft, given.draft, logs) as server:
                wait_healthy(server, 600)
                asker = Asker(server, given.needle_keep)
                places = range(*given.places)
                results["needle"] = needle(asker, given.needle_tokens, places)
                console.print("needle", results["needle"])
    if given.json is not None:
        given.json.write_text(json.dumps(results, indent=1))
    show(console, results)


def show(console: Console, results: dict[str, Any]) -> None:
    table = Table("what", "value", "target", "")
    rows = (
        ("ttft", "time to the first token, over dense", "ratio", TTFT_AT_MOST, -1),
        ("gaps", "p99 gap of streams beside it, over before", "ratio", GAP_AT_MOST, -1),
        (
            "decode",
            "decode speed after it, over dense of equal length",
            "ratio",
            DECODE_AT_LEAST,
            1,
        ),
        ("needle", "needles found", "share", FOUND_AT_LEAST, 1),
    )
    failed = False
    for name, what, key, bound, sign in rows:
        if name in results:
            value = results[name][key]
            fits = sign * value >= sign * bound
            failed |= not fits
            target = f"{'at least' if sign > 0 else 'at most'} {bound}"
            table.add_row(what, f"{value:.3g}", target, "PASS" if fits else "FAIL")
    console.print(table)
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
