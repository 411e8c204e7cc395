"""What the tests of hostile, broken and mixed load share: neighbours that watch, and numbers that hurt."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import httpx
from api.endpoint import Endpoint
from api.endpoints import CHAT, COMPLETIONS, GENERATE, MESSAGES, OLLAMA, RESPONSES
from conftest import PATIENCE, Server

INTEGERS = ("-1", "0", "2147483648", "9223372036854775808", "18446744073709551616", "1" + "0" * 40)
OTHERS = (
    "-9223372036854775809",
    "0.5",
    "1e-39",
    "1e308",
    "1e999",
    "NaN",
    "true",
    '"7"',
    "[1]",
    "{}",
)
NUMBERS = (*INTEGERS, *OTHERS)
"""As they are written: no Python number must be able to say them."""

FIELDS: dict[Endpoint, tuple[str, ...]] = {
    CHAT: (
        "temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "max_completion_tokens", "n",
        "typical_p", "xtc_probability", "xtc_threshold", "repetition_penalty", "presence_penalty",
        "frequency_penalty", "min_tokens", "priority", "timeout", "top_logprobs",
        "thinking_token_budget", "stop_token_ids.", "logit_bias.5",
    ),
    COMPLETIONS: (
        "temperature", "top_p", "top_k", "seed", "max_tokens", "n", "best_of", "min_tokens", "logprobs",
        "prompt_logprobs", "repetition_penalty", "priority", "stop_token_ids.", "logit_bias.5", "prompt.",
    ),
    MESSAGES: (
        "temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "min_tokens", "priority",
        "repetition_penalty", "timeout", "logit_bias.5", "thinking.budget_tokens",
    ),
    RESPONSES: (
        "temperature", "top_p", "top_k", "seed", "max_output_tokens", "min_tokens", "top_logprobs",
        "max_tool_calls", "priority", "repetition_penalty", "stop_token_ids.", "logit_bias.5",
    ),
    GENERATE: (
        "sampling_params.temperature", "sampling_params.top_p", "sampling_params.top_k",
        "sampling_params.min_p", "sampling_params.sampling_seed", "sampling_params.max_new_tokens",
        "sampling_params.min_new_tokens", "sampling_params.n", "sampling_params.repetition_penalty",
        "sampling_params.stop_token_ids.", "sampling_params.logit_bias.5", "logprob_start_len",
        "top_logprobs_num", "priority", "input_ids.",
    ),
    OLLAMA: (
        "options.temperature", "options.top_k", "options.top_p", "options.seed", "options.num_predict",
        "options.num_ctx", "options.repeat_penalty", "options.repeat_last_n", "top_logprobs", "keep_alive",
    ),
}  # fmt: skip
"""The numbers that an endpoint takes; a dot at the end stands for a list of one."""


def with_number(body: dict[str, Any], field: str, number: str) -> bytes:
    """The body as JSON, with a number in a field as it is written."""
    *outer, last = field.split(".")
    place = body
    for step in outer[:-1] if not last else outer:
        place = place.setdefault(step, {})
    mark = "the number comes here"
    place[last or outer[-1]] = mark if last else [mark]
    if field.startswith("input_ids"):
        body.pop("text")
    if field.startswith("thinking."):
        body["thinking"]["type"] = "enabled"
    return json.dumps(body).replace(f'"{mark}"', number).encode()


class Neighbour:
    """A stream of somebody else's, read as it comes."""

    def __init__(self, client: httpx.Client, endpoint: Endpoint, body: dict[str, Any]) -> None:
        self.lines: list[str] = []
        self.times: list[float] = []
        self._asked = (client, endpoint, body)
        self._leave = threading.Event()
        self._moved = threading.Condition()
        self._thread = threading.Thread(target=self._read)
        self.ended = False

    def start(self) -> Neighbour:
        self._thread.start()
        return self

    def _read(self) -> None:
        client, endpoint, body = self._asked
        try:
            with endpoint.open(client, body) as response:
                for line in response.iter_lines():
                    if line.startswith("data: "):
                        with self._moved:
                            self.lines.append(line.removeprefix("data: "))
                            self.times.append(time.monotonic())
                            self._moved.notify_all()
                    if self._leave.is_set():
                        return
        finally:
            with self._moved:
                self.ended = True
                self._moved.notify_all()

    def move(self, lines: int = 1, patience: float = PATIENCE) -> None:
        """Until so many more lines have come."""
        with self._moved:
            goal = len(self.lines) + lines
            self._moved.wait_for(lambda: self.ended or len(self.lines) >= goal, patience)
            if self.lines and "[DONE]" in self.lines[-1]:
                return  # it came to its own end, and so did not stand still
            assert len(self.lines) >= goal, f"the stream stands still after {self.lines[-1:]}"

    def leave(self) -> None:
        self._leave.set()
        self._thread.join(PATIENCE)

    def text(self, patience: float = PATIENCE) -> str:
        """All that it said, once it has ended as it should."""
        self._thread.join(patience)
        assert self.lines and self.lines[-1] == "[DONE]", self.lines[-1:]
        chunks = [json.loads(line) for line in self.lines[:-1]]
        assert not any("error" in c for c in chunks), chunks[-1]
        choices = [choice for c in chunks for choice in c["choices"]]
        return "".join(c.get("text") or c.get("delta", {}).get("content") or "" for c in choices)

    def longest_gap(self, since: float, until: float) -> float:
        marks = [since, *(t for t in self.times if since < t < until), until]
        return max(after - before for before, after in pairwise(marks))


@contextmanager
def beside(client: httpx.Client, endpoint: Endpoint, body: dict[str, Any]) -> Iterator[Neighbour]:
    """An endless stream that runs while something is done beside it."""
    stream = Neighbour(client, endpoint, body).start()
    try:
        stream.move(5)
        yield stream
    finally:
        stream.leave()


def resident(pid: int) -> int:
    """Bytes that a process holds in memory."""
    told = subprocess.run(["ps", "-o", "rss=", "-p", str(pid)], capture_output=True, text=True)
    return int(told.stdout) * 1024


class Watched:
    """The largest value of something that is looked at all the while."""

    def __init__(self, look: Callable[[], int]) -> None:
        self._look = look
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.peak = 0

    def _run(self) -> None:
        while not self._done.wait(0.05):
            self.peak = max(self.peak, self._look())

    def __enter__(self) -> Watched:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()


def health(server: Server) -> tuple[int, dict[str, Any]]:
    response = server.http.get("/health")
    return response.status_code, dict(response.json())
