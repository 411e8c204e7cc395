"""Two hundred requests in random order, with random wishes and ends, on three ranks: nobody drifts."""

from __future__ import annotations

import random
import re
import threading
from pathlib import Path
from typing import Any

import httpx
from conftest import Server
from split_models import LONG, ranks, write

pytestmark = LONG


def test_two_hundred_random_requests_leave_all_ranks_with_one_state(tmp_path: Path) -> None:
    folder = write(
        tmp_path / "wide",
        "llama",
        num_attention_heads=6,
        num_key_value_heads=3,
        intermediate_size=96,
    )
    server = Server(
        folder, "--ranks", "3", "--cache-memory", "2M", "--kv-memory", "6M"
    ).wait_ready()
    dice = random.Random(17)
    plans = [_plan(dice) for _ in range(200)]
    ended: list[str] = []
    slots = threading.Semaphore(16)

    def ask(body: dict[str, Any], leave: int | None) -> None:
        try:
            ended.append(_ask(server, body, leave))
        finally:
            slots.release()

    threads = []
    for body, leave in plans:
        slots.acquire()
        threads.append(threading.Thread(target=ask, args=(body, leave)))
        threads[-1].start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive(), "a request hangs"
    assert len(ended) == 200 and set(ended) <= {"done", "left"}, ended
    told = ranks(server)
    assert server.status()["restarts"] == 0
    assert all(r["turns"] >= 50 and r["checks"] >= r["turns"] // 50 - 1 for r in told[1:])
    print([(r["rank"], r["turns"], r["checks"]) for r in told])
    server.stop()
    # At the end the states were compared once more.
    assert (
        len(re.findall(r"rank \d has ended; its state was found the same \d+ times", server.log()))
        == 2
    )
    assert "drifted" not in server.log()


def _plan(dice: random.Random) -> tuple[dict[str, Any], int | None]:
    words = ["mill", "river", "wheel", "water", "grain", "stone", "old", "wide", "slow", "deep"]
    head = "The mill by the river was old. " * dice.choice([0, 1, 4])
    body: dict[str, Any] = {
        "prompt": head + " ".join(dice.choice(words) for _ in range(dice.randrange(1, 30))),
        "max_tokens": dice.choice([1, 3, 20, 60]),
        "temperature": dice.choice([0, 0.7, 1.3]),
        "seed": dice.randrange(1 << 30),
        "n": dice.choice([1, 1, 1, 3]),
        "stream": True,
        "priority": dice.choice([0, 0, 1]),
    }
    if dice.random() < 0.3:
        body["stop"] = [dice.choice("abcde")]
    if dice.random() < 0.2:
        body["regex"] = "[a-f]{3,9}"
    if dice.random() < 0.2:
        body["logprobs"] = 2
    if dice.random() < 0.2:
        body["logit_bias"] = {str(dice.randrange(3, 200)): dice.choice([-100, 5])}
    if dice.random() < 0.2:
        body |= {"repetition_penalty": 1.3, "top_k": 20, "min_p": 0.02}
    return body, dice.choice([None, None, 0, 3, 9])


def _ask(server: Server, body: dict[str, Any], leave: int | None) -> str:
    with server.http.stream("POST", "/v1/completions", json=body, timeout=110) as stream:
        assert stream.status_code == 200
        try:
            for number, line in enumerate(stream.iter_lines()):
                if leave is not None and number >= leave:
                    return "left"
                if line == "data: [DONE]":
                    return "done"
        except httpx.TransportError:
            return "broken"
    return "silent"
