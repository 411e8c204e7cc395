"""2,000 short texts at once against one by one, over HTTP, on one server.

    PYTHONPATH=. python benchmarks/embed.py --model FOLDER

The texts are of 5 to 14 words. "At once" is one request; "one by one" is one request after the other on
one connection, of which `--singles` are sent and the rest is extrapolated.
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import subprocess
import sys
import time

import httpx

WORDS = [
    *("the", "a", "cat", "dog", "river", "mill", "stone", "water", "wheel", "bread", "flour"),
    *("engine", "city", "capital", "music", "paper", "green", "small", "large", "old", "new"),
    *("fast", "slow", "makes", "turns", "grinds", "carries", "holds", "finds", "loses", "opens"),
]


def texts(count: int) -> list[str]:
    dice = random.Random(0)
    return [" ".join(dice.choices(WORDS, k=dice.randint(5, 14))) for _ in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--texts", type=int, default=2000)
    parser.add_argument("--singles", type=int, default=200)
    options = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "millrace", "serve", options.model, "--port", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        print(json.dumps(measure(f"http://127.0.0.1:{port}", options.texts, options.singles)))
    finally:
        server.terminate()
        server.wait(60)


def measure(url: str, count: int, singles: int) -> dict[str, float]:
    with httpx.Client(base_url=url, timeout=600) as client:
        _await(client)
        given = texts(count)
        _embed(client, given[:64])
        start = time.perf_counter()
        tokens = _embed(client, given)
        together = time.perf_counter() - start
        start = time.perf_counter()
        for text in given[:singles]:
            _embed(client, [text])
        apart = (time.perf_counter() - start) * count / singles
    return {
        "texts": count,
        "tokens": tokens,
        "together_s": round(together, 2),
        "one_by_one_s": round(apart, 2),
        "times_faster": round(apart / together, 1),
        "tokens_per_s": round(tokens / together),
    }


def _embed(client: httpx.Client, given: list[str]) -> int:
    response = client.post("/v1/embeddings", json={"input": given, "encoding_format": "base64"})
    response.raise_for_status()
    return int(response.json()["usage"]["prompt_tokens"])


def _await(client: httpx.Client) -> None:
    while True:
        try:
            if client.get("/health").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)


if __name__ == "__main__":
    main()
