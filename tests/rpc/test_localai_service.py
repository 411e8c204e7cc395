"""LocalAI's Backend service on a started process, with a model whose answers are written down."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import scripted
from conftest import until
from rpc.localai_backend import NO_DISK, Backend, Client, refused, text_of
from scripted import Rule, call, think

from millrace.rpc.localai import wire

COUNT = "one two three four five six seven eight nine ten"
CIRCLE = "Off we go: " + "round and round, " * 100 + "home."
LONG = " ".join(f"word{n}" for n in range(3000))
ODD = "né 漢字 🙂👩‍🚀 \u2028 ﬁn"
RULES = [
    Rule("weather", think("I look it up.", call("get_weather", location="Paris"))),
    Rule("both", call("get_weather", location="a") + "\n" + call("get_weather", location="ü")),
    Rule("count", COUNT),
    Rule("long", LONG),
    Rule("circle", CIRCLE),
    Rule("odd", ODD),
    Rule("deep", think("Deep thought.", "Forty-two.")),
    Rule("json", '{"name": "mill"}'),
]
TOOLS = json.dumps(
    [
        {
            "type": "function",
            "function": {
                "name": "get_weather",
                "parameters": {
                    "type": "object",
                    "properties": {"location": {"type": "string"}},
                    "required": ["location"],
                },
            },
        }
    ]
)
TRUSTED = ["trust_remote_code:true"]
NOT_LOADED, WRONG = grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.INVALID_ARGUMENT


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, default_model: Path) -> Path:
    place = tmp_path_factory.mktemp("localai") / "script"
    return scripted.make(place, default_model, RULES, style="thinking")


@pytest.fixture(scope="module")
def backend(folder: Path) -> Iterator[Backend]:
    running = Backend("--as", "mlx-vlm").wait_up()
    # Before a model is there:
    for method, fields in (
        ("TokenizeString", {"Prompt": "x"}), ("Predict", {"Prompt": "x"}),
        ("PredictStream", {"Prompt": "x"}), ("Detokenize", {"tokens": [1]}),
        ("Embedding", {"Embeddings": "x"}), ("Score", {"prompt": "x", "candidates": ["y"]}),
        ("Rerank", {"query": "x", "documents": ["y"]}), ("ModelMetadata", {}),
    ):  # fmt: skip
        assert refused(getattr(running.client, method), **fields)[0] is NOT_LOADED, method
    assert running.client.Status().state == wire.UNINITIALIZED
    assert running.client.Free().success
    result = running.load(str(folder), Options=TRUSTED)
    assert (result.success, result.message) == (True, "MLX-VLM model loaded successfully")
    yield running
    assert running.stop() == 0


@pytest.fixture
def client(backend: Backend) -> Client:
    return backend.client


def _chat(say: str, **fields: Any) -> dict[str, Any]:
    messages = [wire.Message(role="user", content=say)]
    return {"Messages": messages, "UseTokenizerTemplate": True} | fields


def _calls(replies: list[Any]) -> dict[int, list[Any]]:
    found: dict[int, list[Any]] = {}
    for reply in replies:
        for delta in reply.chat_deltas:
            for piece in delta.tool_calls:
                found.setdefault(piece.index, []).append(piece)
    return found


def _thoughts(replies: list[Any]) -> str:
    return "".join(d.reasoning_content for r in replies for d in r.chat_deltas)


def test_the_loop_guard_is_asked_for_in_the_metadata(client: Client) -> None:
    free = client.Predict(**_chat("circle"))
    assert free.message.decode() == CIRCLE
    guarded = _chat("circle", Metadata={"loop_guard": "true"})
    whole = client.Predict(**guarded)
    assert 257 <= whole.tokens < 300 < free.tokens
    assert CIRCLE.startswith(whole.message.decode())
    assert text_of(list(client.PredictStream(**guarded))).encode() == whole.message
    wrong = _chat("circle", Metadata={"loop_guard": "maybe"})
    status, message = refused(client.Predict, **wrong)
    assert status is WRONG and "loop_guard" in message


@pytest.mark.parametrize("say", ["count", "odd", "deep", "weather", "both"])
def test_streamed_and_whole_are_the_same_and_nothing_is_said_twice(
    client: Client, say: str
) -> None:
    fields = _chat(say, Tools=TOOLS)
    whole = client.Predict(**fields)
    replies = list(client.PredictStream(**fields))
    delta = whole.chat_deltas[0]
    assert len(whole.chat_deltas) == 1 and delta.content.encode() == whole.message
    contents = [d.content for r in replies for d in r.chat_deltas]
    assert text_of(replies) == "".join(contents) == delta.content
    assert _thoughts(replies) == delta.reasoning_content
    calls = _calls(replies)
    assert list(calls) == [c.index for c in delta.tool_calls]
    for call_ in delta.tool_calls:
        pieces = calls[call_.index]
        assert [p.name for p in pieces if p.name] == ["get_weather"]
        assert "".join(p.arguments for p in pieces) == call_.arguments
        assert len({p.id for p in pieces if p.id}) == 1
    last = replies[-1]
    assert not last.message and not last.chat_deltas
    assert (last.tokens, last.prompt_tokens) == (whole.tokens, whole.prompt_tokens)
    assert last.tokens > 0 and last.timing_prompt_processing > 0
    assert all(not r.tokens and not r.prompt_tokens for r in replies[:-1])


def test_reasoning_and_calls_are_apart_from_the_text(client: Client) -> None:
    replies = list(client.PredictStream(**_chat("weather", Tools=TOOLS)))
    assert text_of(replies) == "" and _thoughts(replies).strip() == "I look it up."
    pieces = _calls(replies)[0]
    assert json.loads("".join(p.arguments for p in pieces)) == {"location": "Paris"}
    whole = client.Predict(**_chat("both", Tools=TOOLS))
    found = [json.loads(c.arguments)["location"] for c in whole.chat_deltas[0].tool_calls]
    assert found == ["a", "ü"]
    assert client.Predict(**_chat("odd")).message.decode() == ODD


def test_without_tools_a_call_stays_text_and_none_never_calls(client: Client) -> None:
    for fields in ({}, {"Tools": TOOLS, "ToolChoice": "none"}):
        reply = client.Predict(**_chat("both", **fields))
        assert not reply.chat_deltas[0].tool_calls and b"get_weather" in reply.message


def test_a_demanded_call_is_made(client: Client) -> None:
    named = '{"type": "function", "function": {"name": "get_weather"}}'
    for choice in ("required", named):
        reply = client.Predict(**_chat("count", Tools=TOOLS, ToolChoice=choice, Tokens=60))
        calls = reply.chat_deltas[0].tool_calls
        assert reply.message == b"" and calls[0].name == "get_weather"


def test_thinking_is_switched_by_metadata_in_both_directions(client: Client) -> None:
    def prompt(**metadata: str) -> Any:
        return client.Predict(**_chat("deep", Metadata=metadata))

    on, off = prompt(enable_thinking="true"), prompt(enable_thinking="false")
    assert on.chat_deltas[0].reasoning_content and not off.chat_deltas[0].reasoning_content
    assert on.message == off.message == b"Forty-two."
    kwargs = prompt(chat_template_kwargs='{"enable_thinking": false}')
    assert kwargs.prompt_tokens == off.prompt_tokens > on.prompt_tokens


@pytest.mark.parametrize("stop", ["four", "four five", "r f", " seven", "ten"])
def test_a_stop_string_is_in_no_reply(client: Client, stop: str) -> None:
    fields = _chat("count", StopPrompts=["absent", stop])
    replies = list(client.PredictStream(**fields))
    text = COUNT[: COUNT.index(stop)]
    assert text_of(replies) == text
    assert client.Predict(**fields).message.decode() == text
    assert all(stop.encode() not in r.message for r in replies)


def test_logprobs_are_whole_at_the_end(client: Client) -> None:
    fields = _chat("count", Logprobs=1, TopLogprobs=2, Tokens=5)
    replies = list(client.PredictStream(**fields))
    assert not any(r.logprobs for r in replies[:-1])
    found = json.loads(replies[-1].logprobs)["content"]
    assert found == json.loads(client.Predict(**fields).logprobs)["content"]
    assert "".join(e["token"] for e in found) == text_of(replies) and len(found) == 5
    for entry in found:
        assert set(entry) == {"id", "token", "bytes", "logprob", "top_logprobs"}
        assert bytes(entry["bytes"]).decode() == entry["token"]
        assert entry["top_logprobs"][0]["id"] == entry["id"]
        assert len(entry["top_logprobs"]) == 2
    plain = json.loads(client.Predict(**_chat("count", Logprobs=1, Tokens=2)).logprobs)["content"]
    assert [e["top_logprobs"] for e in plain] == [[], []]
    assert not client.Predict(**_chat("count", Tokens=2)).logprobs


def test_a_grammar_holds_the_answer(client: Client) -> None:
    grammar = 'root ::= "yes" | "no"'
    for fields in (_chat("count"), {"Prompt": "count"}):
        reply = client.Predict(Grammar=grammar, **fields)
        assert reply.message in (b"yes", b"no")


def test_a_bias_and_ignored_ends_are_honoured(client: Client) -> None:
    first = json.loads(client.Predict(**_chat("count", Logprobs=1, Tokens=1)).logprobs)
    token = first["content"][0]["id"]
    biased = client.Predict(**_chat("count", LogitBias=json.dumps({str(token): -100}), Tokens=1))
    assert biased.message  # a certainty of 1000 outweighs a bias of 100: it is honoured, not a ban
    assert client.Predict(**_chat("count")).tokens < 30
    assert client.Predict(**_chat("count", IgnoreEOS=True, Tokens=40)).tokens == 40


def test_tokens_there_and_back(client: Client) -> None:
    found = client.TokenizeString(Prompt=ODD)
    assert found.length == len(found.tokens) > 5
    assert client.Detokenize(tokens=found.tokens).content == ODD
    chat = client.TokenizeString(**_chat("count"))
    assert chat.length == client.Predict(**_chat("count", Tokens=1)).prompt_tokens
    assert client.TokenizeString().length == 0


def test_what_the_model_is_and_does(client: Client, backend: Backend) -> None:
    client.Predict(**_chat("count"))
    told = client.ModelMetadata()
    assert told.supports_thinking and told.rendered_template.endswith("<|im_start|>assistant\n")
    metrics = client.GetMetrics()
    assert metrics.tokens_generated > 0 and metrics.prompt_tokens_processed > 0
    assert metrics.tokens_per_second > 0
    state = client.Status()
    assert state.state == wire.READY and state.memory.total > 0
    assert state.memory.breakdown["weights"] > 0


def test_the_model_that_is_meant_must_be_the_one_that_is_loaded(
    client: Client, folder: Path
) -> None:
    asked = {
        "Predict": _chat("count"), "PredictStream": _chat("count"),
        "TokenizeString": {"Prompt": "x"}, "Embedding": {"Embeddings": "x"},
        "Score": {"prompt": "x", "candidates": ["y"]}, "Rerank": {"query": "x", "documents": ["y"]},
    }  # fmt: skip
    for method, fields in asked.items():
        code, text = refused(getattr(client, method), ModelIdentity="other", **fields)
        assert code is grpc.StatusCode.NOT_FOUND
        assert text == f"model identity mismatch: loaded '{folder}', requested 'other'"
    assert client.Predict(ModelIdentity=str(folder), **_chat("count")).message


@pytest.mark.parametrize(
    "fields",
    [
        {}, {"UseTokenizerTemplate": True}, {"Messages": [wire.Message(role="user", content="x")]},
        _chat("x", Images=["AAAA"]), _chat("x", Videos=["AAAA"]), _chat("x", Audios=["AAAA"]),
        _chat("x", Mirostat=2), _chat("x", TailFreeSamplingZ=0.5), _chat("x", NegativePrompt="y"),
        _chat("x", RopeFreqBase=1e6), _chat("x", Penalty=1.1, Repeat=64),
        _chat("x", Temperature=float("nan")), _chat("x", Temperature=float("inf")),
        _chat("x", Temperature=-1), _chat("x", TopP=1.5), _chat("x", TopP=float("-inf")),
        _chat("x", MinP=2), _chat("x", TopK=-(2**31)), _chat("x", Penalty=-1),
        _chat("x", FrequencyPenalty=1e30), _chat("x", Tokens=-5), _chat("x", Tokens=-(2**31)),
        _chat("x", Logprobs=-1), _chat("x", TopLogprobs=2**31 - 1), _chat("x", StopPrompts=[""]),
        _chat("x", StopPrompts=["a"] * 65), _chat("x", LogitBias="{"), _chat("x", LogitBias="[1]"),
        _chat("x", LogitBias='{"1": "x"}'), _chat("x", LogitBias='{"1": NaN}'),
        _chat("x", LogitBias='{"-1": 1}'), _chat("x", LogitBias='{"999999999": 1}'),
        _chat("x", LogitBias='{"1": 1e999}'), _chat("x", LogitBias="[" * 100_000),
        _chat("x", Grammar="root ::= ("), _chat("x", Grammar="what?"),
        _chat("x", Tools="{"), _chat("x", Tools='"f"'), _chat("x", Tools="[1]"),
        _chat("x", Tools='[{"type": "function"}]'), _chat("x", ToolChoice="required"),
        _chat("x", Tools=TOOLS, ToolChoice="sometimes"), _chat("x", Tools=TOOLS, ToolChoice="{"),
        _chat("x", Tools=TOOLS, ToolChoice='{"function": {"name": "other"}}'),
        {"Prompt": "x", "Tools": TOOLS, "ToolChoice": "required"},
        _chat("x", Metadata={"enable_thinking": "perhaps"}),
        _chat("x", Metadata={"chat_template_kwargs": "{"}),
        _chat("x", Metadata={"chat_template_kwargs": "[]"}),
        _chat("x", Metadata={"chat_template_kwargs": '{"messages": []}'}),
        {"Messages": [wire.Message(role="assistant", tool_calls="{")], "UseTokenizerTemplate": True},
        {"Messages": [wire.Message(role="assistant", tool_calls="[1]")],
         "UseTokenizerTemplate": True},
        {"Prompt": "mill " * 70_000},
    ],
    ids=lambda fields: str(fields)[-60:],
)  # fmt: skip
def test_what_is_wrong_or_not_there_is_refused(client: Client, fields: dict[str, Any]) -> None:
    assert refused(client.Predict, **fields)[0] is WRONG
    assert refused(client.PredictStream, **fields)[0] is WRONG


def test_what_localai_always_sends_is_taken(client: Client) -> None:
    reply = client.Predict(
        **_chat(
            "count", Seed=2**31 - 1, Threads=4, TopK=40, TopP=0.95, Temperature=0.9, MMap=True,
            F16KV=True, MirostatETA=0.1, MirostatTAU=5, TypicalP=1, TailFreeSamplingZ=1, Batch=512,
            PromptCacheAll=True, NKeep=4, NDraft=3, Tokens=2**31 - 1, CorrelationId="é" * 3000,
            Metadata={"anything": "else"}, ToolChoice="auto",
        )
    )  # fmt: skip
    assert reply.message.decode() == COUNT


def test_bytes_that_are_no_message_are_refused(client: Client) -> None:
    for body in (b"\xff\xff\xff", b"\x0a\x02\xff\xfe", b"\x0a\xff\xff\xff\xff\x0f"):
        assert refused(client.raw, "Predict", body)[0] is WRONG
    assert refused(client.raw, "TTS", b"")[0] is grpc.StatusCode.UNIMPLEMENTED
    assert refused(client.Detokenize, tokens=[-1])[0] is WRONG
    assert refused(client.Detokenize, tokens=[2**31 - 1])[0] is WRONG
    for fields in ({"candidates": []}, {"candidates": [""]}, {"candidates": ["x"] * 2049},
                   {"candidates": ["x"], "stable_prefix_len": -1}):  # fmt: skip
        assert refused(client.Score, prompt="a", **fields)[0] is WRONG
    for media in ("Videos", "Audios", "Images"):
        assert refused(client.Embedding, Embeddings="x", **{media: ["AAAA"]})[0] is WRONG
        assert refused(client.TokenizeString, **_chat("x", **{media: ["AAAA"]}))[0] is WRONG
    code, text = refused(client.Embedding, Embeddings="x")
    assert code is WRONG and "embeddings: true" in text
    code, text = refused(client.Rerank, query="x", documents=["y"])
    assert code is WRONG and "reranking: true" in text
    assert refused(client.Rerank, query="x", documents=["y"])[0] is WRONG


def _until_idle(client: Client) -> bool:
    return until(lambda: client.Status().state == wire.READY)


def test_a_client_that_leaves_frees_its_row(client: Client) -> None:
    stream = client.PredictStream(**_chat("long"))
    next(stream)
    assert client.Status().state == wire.BUSY
    stream.cancel()
    assert _until_idle(client)
    whole = client.begun("Predict", **_chat("long"))
    assert until(lambda: client.Status().state == wire.BUSY)
    whole.cancel()
    assert _until_idle(client)


def test_a_stream_goes_on_when_its_engine_is_killed(client: Client, backend: Backend) -> None:
    stream = client.PredictStream(**_chat("long", Tokens=1500))
    replies = [next(stream) for _ in range(20)]
    backend.kill_engine()
    replies += list(stream)
    assert replies[-1].tokens == 1500 and LONG.startswith(text_of(replies))


def test_a_prompt_of_45_megabytes_is_refused_beside_a_stream(client: Client) -> None:
    stream = client.PredictStream(**_chat("long", Tokens=400))
    next(stream)
    code, text = refused(client.Predict, Prompt="x" * (45 << 20))
    assert code is WRONG and "tokens" in text
    assert list(stream)[-1].tokens == 400


def test_loading_what_is_loaded_is_nothing_and_what_cannot_be_says_why(
    backend: Backend, folder: Path, tmp_path: Path
) -> None:
    engines = backend.engines()
    assert backend.load(str(folder), Options=TRUSTED).success
    assert backend.engines() == engines
    for fields in ({"Model": ""}, {"EngineArgs": '{"nonsense": 1}'}, {"DraftModel": "x"},
                   {"Model": str(tmp_path)}, {"Options": ["hostfile:x"]}):  # fmt: skip
        message = wire.ModelOptions(**{"Model": str(folder), "Options": TRUSTED} | fields)
        result = backend.client.LoadModel(message)
        assert not result.success and result.message.startswith("Error loading MLX model: ")
    assert backend.client.Predict(**_chat("count")).message.decode() == COUNT


def test_options_win_over_the_request_and_a_change_of_model_waits_for_answers(
    backend: Backend, folder: Path
) -> None:
    """Two loads at once and a stream under way: each gets its turn, and the stream its end."""
    client = backend.client
    stream = client.PredictStream(**_chat("long", Tokens=300))
    next(stream)
    limited = [*TRUSTED, "max_tokens:3"]
    results: list[Any] = []
    loads = [
        threading.Thread(
            target=lambda o=options: results.append(backend.load(str(folder), Options=o))
        )
        for options in ([*limited, "seed:1"], limited)
    ]
    for load in loads:
        load.start()
    assert list(stream)[-1].tokens == 300
    for load in loads:
        load.join()
    assert [r.success for r in results] == [True, True] and len(backend.engines()) == 1
    assert client.Predict(**_chat("count", Tokens=9)).tokens == 3


def test_free_lets_the_engine_go_and_another_load_works(backend: Backend, folder: Path) -> None:
    client = backend.client
    assert len(backend.engines()) == 1
    assert client.Free().success
    assert backend.engines() == []
    assert refused(client.Predict, **_chat("count"))[0] is NOT_LOADED
    backend.loaded(str(folder), Options=TRUSTED)
    assert client.Predict(**_chat("count")).message.decode() == COUNT


def test_free_gives_running_answers_their_time(backend: Backend, folder: Path) -> None:
    client = backend.client
    stream = client.PredictStream(**_chat("long", Tokens=200))
    next(stream)
    freeing = client.begun("Free")
    assert list(stream)[-1].tokens == 200
    assert freeing.result().success and backend.engines() == []
    backend.loaded(str(folder), Options=TRUSTED, EngineArgs=NO_DISK)
