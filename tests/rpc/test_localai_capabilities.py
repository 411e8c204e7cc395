"""LocalAI's own list of what a backend must do, on the default model; and how the process ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from adapters_help import random_pairs, write_mlx
from api import tiny_folder
from conftest import PATIENCE, ROOT, Gate, free_port, until
from rpc.localai_backend import Backend, Client, refused, text_of

from millrace.rpc.localai import wire

MODEL = "smollm2"
SIZES = {"ContextSize": 512, "Threads": 4, "NBatch": 128}


@pytest.fixture(scope="module")
def backend(default_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Backend]:
    gate = Gate(tmp_path_factory.mktemp("gate"))
    token = {"LOCALAI_GRPC_AUTH_TOKEN": "token-of-this-test"}
    running = Backend(env=token | gate.env).wait_up()
    loading: list[Any] = []
    thread = threading.Thread(target=lambda: loading.append(running.load(MODEL, **SIZES)))
    with gate.closed():
        thread.start()
        assert until(running.engines)
        for _ in range(3):  # a backend that loads is one that answers
            assert running.client.Health().message == b"OK"
    thread.join()
    assert (loading[0].success, loading[0].message) == (True, "MLX model loaded successfully")
    yield running
    assert running.stop() == 0


@pytest.fixture
def client(backend: Backend) -> Client:
    return backend.client


def test_predict(client: Client) -> None:
    reply = client.Predict(Prompt="The capital of France is", Tokens=20)
    assert b"Paris" in reply.message and 0 < reply.tokens <= 20
    assert reply.prompt_tokens == client.TokenizeString(Prompt="The capital of France is").length


def test_stream(client: Client) -> None:
    replies = list(client.PredictStream(Prompt="Once upon a time", Tokens=20))
    messages = [r.message for r in replies if r.message]
    assert len(messages) > 1 and messages[0] != messages[1]
    whole = client.Predict(Prompt="Once upon a time", Tokens=20)
    assert text_of(replies) == whole.message.decode()


def test_logprobs(client: Client) -> None:
    reply = client.Predict(Prompt="The capital of France is", Tokens=3, Logprobs=1, TopLogprobs=3)
    content = json.loads(reply.logprobs)["content"]
    assert len(content) == reply.tokens == 3
    for entry in content:
        assert entry["logprob"] <= 0 and entry["top_logprobs"][0]["logprob"] == entry["logprob"]


def test_logit_bias(client: Client) -> None:
    prompt = {"Prompt": "The capital of France is", "Tokens": 1, "Logprobs": 1}
    assert client.Predict(LogitBias='{"1":-100}', **prompt).message == b" Paris"
    token = json.loads(client.Predict(**prompt).logprobs)["content"][0]["id"]
    biased = client.Predict(LogitBias=json.dumps({token: -100}), **prompt)
    assert json.loads(biased.logprobs)["content"][0]["id"] != token


def test_tools(client: Client) -> None:
    function = {
        "name": "get_weather",
        "description": "Get the current weather of a location",
        "parameters": {
            "type": "object",
            "properties": {"location": {"type": "string"}},
            "required": ["location"],
        },
    }
    fields = {
        "Messages": [wire.Message(role="user", content="What is the weather in Paris?")],
        "UseTokenizerTemplate": True,
        "Tools": json.dumps([{"type": "function", "function": function}]),
        "Tokens": 60,
    }
    # A model of this size does not call by itself; that it may is for the scripted one to show.
    reply = client.Predict(ToolChoice="required", **fields)
    call = reply.chat_deltas[0].tool_calls[0]
    assert call.name == "get_weather" and "location" in json.loads(call.arguments)
    assert client.Predict(ToolChoice="auto", **fields).tokens > 0


def test_a_seed_is_a_requests_own(client: Client) -> None:
    fields = {"Prompt": "Once upon a time", "Tokens": 12, "Temperature": 1.5}
    with ThreadPoolExecutor(3) as pool:
        first, again, other = pool.map(
            lambda seed: client.Predict(Seed=seed, **fields).message, (7, 7, -8)
        )
    assert first == again != other


def test_five_at_once(client: Client) -> None:
    prompts = [f"{n} plus {n} is" for n in range(5)]
    alone = [client.Predict(Prompt=p, Tokens=8).message for p in prompts]
    with ThreadPoolExecutor(5) as pool:
        together = list(pool.map(lambda p: client.Predict(Prompt=p, Tokens=8).message, prompts))
    assert together == alone


def test_a_prompt_that_was_seen_is_not_run_again(client: Client) -> None:
    fields = {"Prompt": "Mills grind by the river. " * 20, "Tokens": 4}
    before = client.GetMetrics().prompt_tokens_processed
    first = client.Predict(**fields)
    between = client.GetMetrics().prompt_tokens_processed
    second = client.Predict(**fields)
    assert first.message == second.message and first.prompt_tokens == second.prompt_tokens
    assert between - before == first.prompt_tokens
    assert client.GetMetrics().prompt_tokens_processed - between <= 1


def test_score(client: Client) -> None:
    found = client.Score(
        prompt="The capital of France is",
        candidates=[" Paris", " London", " a blue potato"],
        include_token_logprobs=True,
        length_normalize=True,
        stable_prefix_len=11,
    ).candidates
    assert found[0].log_prob > found[1].log_prob > found[2].log_prob
    for one in found:
        assert one.num_tokens == len(one.tokens)
        assert sum(t.log_prob for t in one.tokens) == pytest.approx(one.log_prob)
        assert one.length_normalized_log_prob == pytest.approx(one.log_prob / one.num_tokens)
    assert "".join(t.token for t in found[2].tokens) == " a blue potato"
    top = json.loads(
        client.Predict(Prompt="The capital of France is", Tokens=1, Logprobs=1).logprobs
    )
    assert found[0].log_prob == pytest.approx(top["content"][0]["logprob"], abs=1e-3)


def test_health_answers_beside_long_answers(client: Client) -> None:
    streams = [client.PredictStream(Prompt=f"{n}", Tokens=60, IgnoreEOS=True) for n in range(4)]
    first = [next(s) for s in streams]
    for _ in range(20):
        assert client.Health().message == b"OK"
    assert len(first) == 4 and all(list(s)[-1].tokens == 60 for s in streams)


def test_a_token_is_needed_for_everything(backend: Backend) -> None:
    denied = grpc.StatusCode.UNAUTHENTICATED
    for token in (None, "", "other", "token-of-this-tes", "TOKEN-OF-THIS-TEST"):
        stranger = Client(backend.address, token)
        for method in ("Health", "Predict", "PredictStream", "LoadModel", "Free", "Status"):
            assert refused(getattr(stranger, method))[0] is denied
        stranger.channel.close()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, default_model: Path) -> str:
    return str(tiny_folder.make(tmp_path_factory.mktemp("backend") / "tiny", default_model))


def test_an_adapter_is_in_every_answer(
    client: Client, backend: Backend, tmp_path: Path, tiny: str
) -> None:
    queries = {f"model.layers.{n}.self_attn.q_proj": (32, 32) for n in range(2)}
    values = {f"model.layers.{n}.self_attn.v_proj": (32, 16) for n in range(2)}
    write_mlx(tmp_path / "lora", random_pairs(queries | values, size=20.0), scale=5.0)
    fields = {"Prompt": "Once upon a time", "Tokens": 8, "IgnoreEOS": True, "Logprobs": 1}
    backend.loaded(tiny)
    bare = client.Predict(**fields).logprobs
    backend.loaded(tiny, LoraAdapter="lora", ModelPath=str(tmp_path))
    assert client.Predict(**fields).logprobs != bare
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "adapter_config.json").write_text("{}")
    result = backend.load(tiny, LoraAdapter="broken", ModelPath=str(tmp_path))
    assert not result.success and "adapter" in result.message


def test_embeddings_and_relevance_where_the_model_can(
    client: Client, backend: Backend, tiny: str
) -> None:
    backend.loaded(tiny, Embeddings=True, Options=["max_kv_size:64"])
    one = client.Embedding(Embeddings="A mill by the river.")
    assert one.dim == len(one.embeddings) == 32 and one.tokens == 1 and one.layout == 1
    assert sum(x * x for x in one.embeddings) == pytest.approx(1, abs=1e-3)
    tokens = client.TokenizeString(Prompt="A mill by the river.").tokens
    assert client.Embedding(EmbeddingTokens=tokens).dim == 32
    ranked = client.Rerank(query="mill", documents=["a river", "mill", "a tree"], top_n=2)
    assert ranked.results[0].text == "mill" and len(ranked.results) == 2
    assert ranked.results[0].index == 1 and ranked.usage.prompt_tokens > 0
    assert refused(client.Predict, Prompt="x")[0] is grpc.StatusCode.INVALID_ARGUMENT
    assert refused(client.Embedding)[0] is grpc.StatusCode.INVALID_ARGUMENT
    assert client.Free().success and backend.engines() == []


def test_distributed_without_hosts_is_one_node_and_the_script_starts_it(
    tmp_path: Path, tiny: str
) -> None:
    """LocalAI starts run.sh and dies: the backend does not outlive it."""
    (tmp_path / "mlx-distributed").symlink_to(ROOT / "localai")
    address = f"127.0.0.1:{free_port()}"
    script = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen(sys.argv[1:])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(300)\n"
    )
    run = str(tmp_path / "mlx-distributed" / "run.sh")
    environment = os.environ | {
        "LOCALAI_BACKEND_PARENT_WATCH_INTERVAL": "50ms",
        "MILLRACE": f"{sys.executable} -m millrace",
    }
    parent = subprocess.Popen(
        [sys.executable, "-c", script, run, "--addr", address],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    client = Client(address)
    try:
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                assert client.Health(timeout=5).message == b"OK"
                break
            except grpc.RpcError:
                assert time.monotonic() < deadline
                time.sleep(0.05)
        result = client.LoadModel(Model=tiny, EngineArgs='{"cache_disk": 0}')
        assert (result.success, result.message) == (True, "Model loaded successfully")
    finally:
        parent.kill()
        parent.wait()
        client.channel.close()
    while _alive(pid):
        if time.monotonic() > deadline + PATIENCE:
            os.kill(pid, signal.SIGKILL)
            raise AssertionError("the backend outlives what started it")
        time.sleep(0.05)


def test_a_door_with_nothing_behind_it_closes() -> None:
    backend = Backend().wait_up()
    listed = subprocess.run(
        ["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    mine = [
        int(pid) for pid, parent in map(str.split, listed) if int(parent) == backend.process.pid
    ]
    assert len(mine) == 1
    os.kill(mine[0], signal.SIGKILL)
    assert backend.process.wait(PATIENCE) == 1
    assert "ended with status -9" in " ".join(backend.log().split())


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat")
    # Where nobody waits for orphans, they stay in the table after their end.
    return not status.exists() or status.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["--worker"], "needs --hostfile and --rank"),
        (["--hostfile", "/x", "--rank", "1"], "add --worker"),
        (["--hostfile", "/x"], "cannot be read"),
        (["--as", "llama"], "--as must be one of"),
        (["--addr", "nowhere.invalid:1"], "Cannot listen on"),
    ],
)
def test_a_start_that_cannot_be_says_why(args: list[str], told: str) -> None:
    command = [sys.executable, "-m", "millrace", "backend", *args]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert ended.returncode == 1 and told in " ".join(ended.stderr.split())
