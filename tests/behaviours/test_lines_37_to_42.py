"""What is owed, lines 37, 38 and 40 to 42 of the list of behaviours: test_NN is line NN.

Broken engines and mixed load: each of these was seen to fail once.
Nothing here is asserted of a clock.
"""

from __future__ import annotations

import os
import random
import re
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import scripted
from api import tiny_folder
from api.endpoints import CHAT, COMPLETIONS
from conftest import Gate, Server
from scripted import Fault, Rule

from behaviours.hostile import (
    Neighbour,
    Watched,
    health,
    resident,
)
from behaviours.owed import Mill, post, until

RECITED = ", ".join(f"line {n}" for n in range(150))
MIB = 1 << 20


FAULTS: tuple[Fault, ...] = ("raise", "die")


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Gate:
    """While it is closed, an engine that is gone is not replaced."""
    return Gate(tmp_path_factory.mktemp("gate"))


@pytest.fixture(scope="module")
def frail(
    tmp_path_factory: pytest.TempPathFactory, default_model: Path, gate: Gate
) -> Iterator[Server]:
    rules = [
        *(Rule(f"{f} at {at}", f"{f} {at} {RECITED}", f, at) for f in FAULTS for at in (0, 5)),
        Rule("hang", f"hang {RECITED}", "hang", 20),
        Rule("", RECITED),
    ]
    folder = tmp_path_factory.mktemp("frail")
    made = scripted.make(folder / "scripted", default_model, rules)
    options = ("--trust-remote-code", "--store", "none")
    server = Server(str(made), *options, env=gate.env).wait_ready()
    yield server
    server.stop()


def _recite(server: Server, count: int) -> list[Neighbour]:
    bodies = [CHAT.body(f"Recite, {n}.", temperature=0) for n in range(count)]
    return [Neighbour(server.http, CHAT, body).start() for body in bodies]


@pytest.mark.parametrize("fault", ["killed", "frozen", "stuck"])
def test_37_an_engine_that_is_no_more_is_noticed(frail: Server, gate: Gate, fault: str) -> None:
    restarts, engine = (frail.status()[key] for key in ("restarts", "engine_pid"))
    streams = _recite(frail, 3)
    for stream in streams:
        stream.move(10)
    told: list[dict[str, Any]] = []

    def is_unwell() -> bool:
        code, body = health(frail)
        if code == 503:
            told.append(body)
        return code == 503

    with gate.closed():
        if fault == "stuck":
            streams.append(Neighbour(frail.http, CHAT, CHAT.body("hang", temperature=0)).start())
        else:
            os.kill(engine, signal.SIGKILL if fault == "killed" else signal.SIGSTOP)
        assert until(is_unwell), "nobody noticed"
    assert told[0]["status"] != "ready" and told[0]["error"], "with a reason"
    assert until(lambda: health(frail)[0] == 200)
    texts = [stream.text() for stream in streams]
    assert texts[:3] == [RECITED] * 3
    assert texts[3:] == ["hang " + RECITED] * (fault == "stuck")
    assert frail.status()["restarts"] == restarts + 1
    assert frail.status()["engine_pid"] != engine
    assert fault != "frozen" or "it was frozen" in frail.log()


@pytest.mark.parametrize("at", [0, 5])
@pytest.mark.parametrize("fault", FAULTS)
def test_38_a_fault_is_its_own_requests_alone(frail: Server, fault: str, at: int) -> None:
    """To the end, the neighbours run beside each other: seen in one of a few tries, as any of them may come
    to its end unseen on a machine that stalls."""
    seen = []
    for _ in range(5):
        seen.append(_most_beside(frail, CHAT.body(f"{fault} at {at}", temperature=0)))
        if seen[-1] == (4, 4):
            break
    assert seen[-1] == (4, 4), seen
    assert health(frail)[0] == 200


def _most_beside(frail: Server, fault: dict[str, Any]) -> tuple[int, int]:
    """How many neighbours a fault had at most after the last death, and how many answered at once."""
    seen: dict[int, tuple[int, int]] = {}

    def look() -> int:
        status = frail.status()
        phases = [r["phase"] for r in status["requests"] if r["id"] != "guilty"]
        there, answering = seen.get(status["restarts"], (0, 0))
        answering = max(answering, phases.count("decode"))
        seen[status["restarts"]] = max(there, len(phases)), answering
        return answering

    streams = _recite(frail, 4)
    for stream in streams:
        stream.move(5)
    with Watched(look):
        guilty = frail.post(CHAT.path, fault, headers={"x-request-id": "guilty"})
        texts = [stream.text() for stream in streams]
    assert guilty.status_code >= 400, guilty.text
    assert CHAT.error(guilty)
    assert texts == [RECITED] * 4
    assert until(lambda: not frail.status()["requests"])
    return next((counts for _, counts in sorted(seen.items(), reverse=True) if counts[0]), (0, 0))


KV, CACHED = 96 * MIB, 32 * MIB


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory, default_model: Path) -> Iterator[Server]:
    """A model whose state is large beside its weights: 32 KiB a token."""
    shape = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 8}
    folder = tmp_path_factory.mktemp("roomy") / "roomy"
    made = tiny_folder.make(folder, default_model, **shape, head_dim=128)
    server = Server(
        str(made), "--store", "none", "--max-running", "16", "--kv-memory", f"{KV // MIB}M",
        "--cache-memory", f"{CACHED // MIB}M", "--speculate", "0", "--prefill-chunk", "128",
    ).wait_ready()  # fmt: skip
    yield server
    server.stop()


def _words(count: int, seed: int) -> str:
    source = random.Random(seed)
    return " ".join(source.choice(("mill", "wheel", "stone", "grain")) for _ in range(count))


def _complete(server: Server, words: int, made: int, seed: int, **more: Any) -> dict[str, Any]:
    body = {"prompt": _words(words, seed), "max_tokens": made, "temperature": 0, "ignore_eos": True}
    response = server.post("/v1/completions", body | more, timeout=600)
    assert response.status_code == 200, response.text
    return dict(response.json())


def _held(server: Server) -> int:
    """Bytes of key-value state, as they are reported."""
    found = re.search(r"^millrace_kv_bytes\{[^}]*\} (\S+)", server.http.get("/metrics").text, re.M)
    assert found
    return int(float(found[1]))


def test_40_memory_stays_within_its_budgets(roomy: Server) -> None:
    _complete(roomy, 20, 4, 0)
    engine = roomy.status()["engine_pid"]
    assert roomy.status()["kv_budget"] == KV
    bound = 1.15 * (resident(engine) + KV + CACHED)
    source = random.Random(40)
    sizes = [(source.randrange(10, 2500), source.randrange(4, 60)) for _ in range(8)]
    with (
        Watched(lambda: resident(engine)) as memory,
        Watched(lambda: _held(roomy)) as held,
        ThreadPoolExecutor(8) as pool,
    ):
        # Sixteen rows of which fifteen leave, and then a long prompt beside the one that stays.
        for _ in range(5):
            stays = pool.submit(_complete, roomy, 5, 400, 1)
            _complete(roomy, 5, 20, 2, n=15, temperature=1)
            if not stays.done():
                break
        else:
            raise AssertionError("nobody stayed")
        assert until(lambda: len(roomy.status()["requests"]) <= 1)
        _complete(roomy, 1900, 20, 3)
        stays.result()
        list(pool.map(lambda n: _complete(roomy, *sizes[n], 10 + n), range(8)))
    assert memory.peak <= bound, f"{memory.peak / MIB:.0f} of {bound / MIB:.0f} MiB"
    assert KV / 2 < held.peak <= KV
    assert until(lambda: _held(roomy) == 0)


def test_40_a_row_that_has_all_the_memory_ends_with_it(roomy: Server) -> None:
    most = KV // roomy.status()["kv_bytes_per_token"]
    with Watched(lambda: _held(roomy)) as held:
        body = {"prompt": [7] * (most - 40), "max_tokens": 400, "temperature": 0}
        answer = roomy.post("/v1/completions", body | {"ignore_eos": True}).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert 30 <= answer["usage"]["completion_tokens"] <= 50, "as many as there was room for"
    assert "raise --kv-memory for longer answers" in roomy.log()
    assert held.peak <= KV


@pytest.mark.parametrize("kind", ["wide", "long"])
def test_41_whoever_waits_is_served(roomy: Server, kind: str) -> None:
    """However many small ones keep coming, a bounded number of them goes first."""
    passed, done = 0, threading.Event()

    def small(client: int) -> None:
        nonlocal passed
        number = 0
        while not done.is_set():
            number += 1
            _complete(roomy, 60, 12, 1000 * client + number)
            passed += 1

    large = {"n": 16, "max_tokens": 4} if kind == "wide" else {"max_tokens": 4}
    words = 10 if kind == "wide" else 2500
    with ThreadPoolExecutor(21) as pool:
        clients = [pool.submit(small, n) for n in range(1, 21)]
        try:
            assert until(lambda: passed > 20)
            before = passed
            asked = pool.submit(
                roomy.post, "/v1/completions", {"prompt": _words(words, 7), **large}, timeout=300
            )
            assert until(lambda: asked.done() or passed > before + 300, 300)
            assert asked.done(), f"{passed - before} others have gone first"
        finally:
            done.set()
        for client in clients:
            client.result()
    assert asked.result().status_code == 200, asked.result().text
    assert len(asked.result().json()["choices"]) == large.get("n", 1)


def _counts(mill: Mill) -> tuple[float, int]:
    return mill.metric("millrace_step_seconds_count"), mill.prefilled


def test_42_mixed_lengths_cost_what_equal_ones_cost(mill: Mill) -> None:
    """Counted in steps and prompt tokens that were run; what those cost is the benchmarks' matter."""
    lengths = {"equal": [400] * 4, "mixed": [250, 350, 450, 550]}
    costs: dict[str, list[float]] = {"equal": [], "mixed": []}
    for turn in range(3):
        for kind, words in lengths.items():
            assert mill.idle()
            before = _counts(mill)
            # Nothing is guessed where logprobs are asked for: a step is a token of each.
            body = COMPLETIONS.body("", max_tokens=64, temperature=0, ignore_eos=True)
            body["cache_salt"] = f"42 {turn} {kind}"
            body["prompt"] = [_words(count, 10 * turn + n) for n, count in enumerate(words)]
            response = post(mill.client, COMPLETIONS, body | {"logprobs": 1})
            assert response.status_code == 200, response.text
            steps, run = (after - was for after, was in zip(_counts(mill), before, strict=True))
            assert run <= response.json()["usage"]["prompt_tokens"], "nothing is run twice"
            costs[kind].append(steps)
    assert 0 < min(costs["mixed"]) <= 1.3 * min(costs["equal"]), costs
