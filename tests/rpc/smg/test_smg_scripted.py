"""The worker's two services with a model whose answers are written down: stops, ends, aborts, refusals."""

from __future__ import annotations

import hashlib
import io
import json
import threading
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import scripted
from conftest import held, until
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from rpc.smg.worker_calls import Engine, Worker, serving, vllm
from scripted import Rule
from smg_grpc_proto.generated import common_pb2

COUNTED = "1, 2, 3, 4, 5, 6, 7, 8, 9, 10"
GREETING = "I say hello world to you."
LONG = "word " * 12_000
RULES = [Rule("Count 1-10", COUNTED), Rule("greet", GREETING), Rule("talk", LONG)]
common: Any = common_pb2


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory, default_model: Path) -> Iterator[Worker]:
    folder = scripted.make(tmp_path_factory.mktemp("smg") / "script", default_model, RULES)
    options = ("--trust-remote-code", "--smg-engine", "both", "--max-running", "8")
    bounds = ("--max-queue", "4", "--reader-timeout", "4")
    with serving(str(folder), "--name", "script", *options, *bounds) as found:
        yield found
        assert "Traceback" not in found.server.log()


@pytest.fixture(params=["vllm", "mlx"])
def engine(request: pytest.FixtureRequest, worker: Worker) -> Engine:
    return getattr(worker, request.param)  # type: ignore[no-any-return]


@pytest.mark.parametrize("stream", [False, True])
def test_both_engines_say_what_http_says(worker: Worker, engine: Engine, stream: bool) -> None:
    prompt = worker.tokens("Count 1-10")
    answer = engine.one(prompt, stream=stream)
    assert worker.text(answer.tokens) == worker.chat("Count 1-10")["message"]["content"] == COUNTED
    assert answer.complete.finish_reason == "stop"
    assert answer.complete.prompt_tokens == len(prompt)
    assert answer.complete.completion_tokens == len(answer.tokens) + 1, "the end counts"
    if stream:
        counts = [c.completion_tokens for c in answer.chunks]
        assert counts == sorted(set(counts)) and counts[-1] == len(answer.tokens)


def test_the_models_own_end_is_never_a_matched_stop(worker: Worker, engine: Engine) -> None:
    end = worker.ids("<|im_end|>")
    for ids in ([], end):
        complete = engine.one(worker.tokens("Count 1-10"), stop_token_ids=ids).complete
        assert _matched(complete) is None


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_token_is_told_and_not_sent(worker: Worker, engine: Engine, stream: bool) -> None:
    (six,) = worker.ids("6")
    answer = engine.one(worker.tokens("Count 1-10"), stream=stream, stop_token_ids=[six])
    assert _matched(answer.complete) == six
    assert six not in answer.tokens
    assert worker.text(answer.tokens) == "1, 2, 3, 4, 5, "
    assert answer.complete.completion_tokens == len(answer.tokens) + 1


def test_a_stop_token_is_sent_where_stops_and_special_tokens_are_to_be_seen(worker: Worker) -> None:
    """A gateway is asked for no_stop_trim, and passes on that special tokens are to be shown."""
    (six,), (end,) = worker.ids("6"), worker.ids("<|im_end|>")
    for ids, last in (([six], six), ([], end)):
        asked = {"stop_token_ids": ids, "skip_special_tokens": False}
        answer = worker.vllm.one(worker.tokens("Count 1-10"), **asked)
        assert answer.tokens[-1] == last
        assert answer.complete.completion_tokens == len(answer.tokens)
        assert _matched(answer.complete) == (six if ids else None)
        # In a stream the gateway writes out whatever it is sent: only where the request says so.
        streamed = worker.vllm.one(worker.tokens("Count 1-10"), stream=True, **asked)
        assert streamed.tokens == answer.tokens[:-1]
        asked["include_stop_str_in_output"] = True
        streamed = worker.vllm.one(worker.tokens("Count 1-10"), stream=True, **asked)
        assert streamed.tokens == answer.tokens


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stop", ["hello world", "llo wor", "6"])
def test_a_stop_string_of_several_tokens_is_told_and_sent_whole(
    worker: Worker, stop: str, stream: bool
) -> None:
    asked = "Count 1-10" if stop == "6" else "greet"
    answer = worker.vllm.one(worker.tokens(asked), stream=stream, stop=[stop, "nowhere"])
    assert answer.complete.matched_stop_str == stop
    text = worker.text(answer.tokens)
    assert stop in text and not text.rstrip().endswith("you.")
    assert answer.complete.completion_tokens == len(answer.tokens)


def test_a_text_is_an_input_too(worker: Worker, engine: Engine) -> None:
    prompt = "<|im_start|>user\nCount 1-10<|im_end|>\n<|im_start|>assistant\n"
    assert worker.text(engine.one(prompt).tokens) == COUNTED


def test_the_cap_is_a_length_and_min_tokens_hold_off_the_end(worker: Worker) -> None:
    complete = worker.vllm.one(worker.tokens("Count 1-10"), max_tokens=3).complete
    assert (complete.finish_reason, len(complete.output_ids)) == ("length", 3)
    prompt = worker.tokens("Count 1-10")
    longer = worker.vllm.one(prompt, min_tokens=40, max_tokens=50).complete
    assert longer.completion_tokens > 40


def test_several_choices_come_from_one_prompt(worker: Worker) -> None:
    answers = worker.vllm.ask(worker.tokens("Count 1-10"), n=3, stream=True)
    assert [worker.text(a.tokens) for a in answers] == [COUNTED] * 3
    assert [a.complete.index for a in answers] == [0, 1, 2]


@pytest.mark.parametrize(
    ("wrong", "of"),
    [
        ({"temperature": -1.0}, "both"),
        ({"temperature": float("nan")}, "both"),
        ({"temperature": float("inf")}, "both"),
        ({"top_p": 1.5}, "both"),
        ({"min_p": -0.5}, "both"),
        ({"repetition_penalty": -3.0}, "both"),
        ({"frequency_penalty": 1e30}, "both"),
        ({"logit_bias": {-1: 1.0}}, "both"),
        ({"logit_bias": {2**31 - 1: 1.0}}, "both"),
        ({"logit_bias": {5: float("nan")}}, "both"),
        ({"stop_token_ids": [2**32 - 1]}, "both"),
        ({"logprobs": -1}, "both"),
        ({"logprobs": 101}, "both"),
        ({"max_tokens": 0}, "both"),
        ({"n": 129}, "vllm"),
        ({"n": 2**32 - 1}, "vllm"),
        ({"stop": [""]}, "vllm"),
        ({"stop": ["x"] * 65}, "vllm"),
        ({"min_tokens": 10, "max_tokens": 5}, "vllm"),
        ({"prompt_logprobs": -1}, "vllm"),
        ({"truncate_prompt_tokens": 0}, "vllm"),
        ({"truncate_prompt_tokens": -2}, "vllm"),
        ({"json_schema": "{"}, "vllm"),
        ({"json_schema": "[]"}, "vllm"),
        ({"regex": "("}, "vllm"),
        ({"grammar": "start: ("}, "vllm"),
        ({"choice": vllm.ChoiceConstraint()}, "vllm"),
        ({"structural_tag": "{"}, "vllm"),
    ],
    ids=str,
)
def test_what_is_out_of_range_is_an_invalid_argument(
    worker: Worker, wrong: dict[str, Any], of: str
) -> None:
    for engine in [worker.vllm] + [worker.mlx] * (of == "both"):
        assert engine.refused([1, 2, 3], **wrong) is grpc.StatusCode.INVALID_ARGUMENT


def test_prompts_that_are_none_are_invalid_arguments(worker: Worker, engine: Engine) -> None:
    invalid = grpc.StatusCode.INVALID_ARGUMENT
    assert engine.refused([]) is invalid
    assert engine.refused("") is invalid
    assert engine.refused([2**32 - 1]) is invalid
    assert engine.refused([1] * 70_000) is invalid
    assert engine.refused([1, 2], id="no spaces") is invalid
    assert engine.refused([1, 2], id="x" * 129) is invalid
    empty = engine.pb.GenerateRequest(request_id="nothing")
    with pytest.raises(grpc.RpcError) as caught:
        list(engine.stub.Generate(empty))
    assert caught.value.code() is invalid


def test_what_this_worker_has_not_is_refused_by_name(worker: Worker) -> None:
    for field in (
        {"kv_transfer_params_json": "{}"},
        {"mm_inputs": vllm.MultimodalInputs()},
        {"media_refs": vllm.MediaRefs()},
        {"extra_mm_inputs": [vllm.MultimodalInputs()]},
        {"data_parallel_rank": 1},
    ):
        wire = worker.vllm.request([1, 2, 3])
        wire.MergeFrom(vllm.GenerateRequest(**field))
        with pytest.raises(grpc.RpcError) as caught:
            list(worker.vllm.stub.Generate(wire))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert next(iter(field)).removeprefix("extra_") in (caught.value.details() or "")
    with pytest.raises(grpc.RpcError) as caught:
        worker.vllm.stub.StartProfile(common.StartProfileRequest())
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    with pytest.raises(grpc.RpcError) as caught:
        worker.vllm.stub.Embed(vllm.EmbedRequest(tokenized={"input_ids": [1]}))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("method", ["Generate", "Abort", "HealthCheck", "GetTokenizer", "Embed"])
def test_what_is_no_message_is_an_invalid_argument(worker: Worker, method: str) -> None:
    call = worker.channel.unary_stream(f"/vllm.grpc.engine.VllmEngine/{method}")
    for garbled in (b"\xff" * 9, b"\x0a\xff", b"\x07\x07"):
        with pytest.raises(grpc.RpcError) as caught:
            list(call(garbled))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_an_abort_ends_its_request_alone_and_unknown_ids_are_nothing(
    worker: Worker, engine: Engine
) -> None:
    prompt = worker.tokens("talk")
    calls = {
        id: engine.stub.Generate(engine.request(prompt, id=id, stream=True)) for id in ("a", "b")
    }
    for call in calls.values():
        next(call)
    engine.stub.Abort(engine.pb.AbortRequest(request_ids=["a", "nobody", "", "x" * 1000]))
    last = list(calls["a"])[-1]
    assert last.complete.finish_reason == "abort"
    next(calls["b"])
    calls["b"].cancel()
    _until(lambda: worker.server.status()["requests"] == [])


def test_an_id_that_runs_cannot_be_taken_and_can_again_afterwards(
    worker: Worker, engine: Engine
) -> None:
    call = engine.stub.Generate(engine.request(worker.tokens("talk"), id="mine", stream=True))
    next(call)
    assert engine.refused([1, 2], id="mine") is grpc.StatusCode.INVALID_ARGUMENT
    call.cancel()
    _until(lambda: worker.server.status()["requests"] == [])
    assert engine.one(worker.tokens("Count 1-10"), id="mine").complete.finish_reason == "stop"


def test_streams_that_are_dropped_leave_no_rows(worker: Worker) -> None:
    prompt = worker.tokens("talk")

    def drop(number: int) -> None:
        stub = (worker.vllm, worker.mlx)[number % 2]
        streamed = number % 3 > 0
        call = stub.stub.Generate(stub.request(prompt, stream=streamed))
        if streamed and number % 4 == 1:
            try:
                next(call)
            except grpc.RpcError as error:
                assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        call.cancel()

    threads = [threading.Thread(target=drop, args=(n,)) for n in range(200)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    _until(lambda: worker.server.status()["requests"] == [])
    assert worker.vllm.one(worker.tokens("Count 1-10")).complete.finish_reason == "stop"


def test_a_full_queue_is_resource_exhausted(worker: Worker, engine: Engine) -> None:
    prompt = worker.tokens("talk")
    calls = [engine.stub.Generate(engine.request(prompt, stream=True)) for _ in range(12)]
    _until(lambda: [r["made_tokens"] > 0 for r in _requests(worker)].count(True) == 8)
    _until(lambda: len(_requests(worker)) == 12)
    with held(worker.server.engine):
        assert engine.refused([1, 2, 3]) is grpc.StatusCode.RESOURCE_EXHAUSTED
        loads = worker.vllm.stub.GetLoads(vllm.GetLoadsRequest()).loads[0]
    assert (loads.num_running_reqs, loads.num_waiting_reqs, loads.num_total_reqs) == (8, 4, 12)
    assert loads.max_running_requests == 8 and 0 < loads.token_usage < 1
    for call in calls:
        call.cancel()
    _until(lambda: worker.server.status()["requests"] == [])


def test_the_cache_is_dropped_when_nothing_is_in_flight_or_not_at_all(worker: Worker) -> None:
    flush, request = worker.vllm.stub.FlushCache, common.FlushCacheRequest
    call = worker.vllm.stub.Generate(worker.vllm.request(worker.tokens("talk"), stream=True))
    next(call)
    told = flush(request(timeout_s=0.1))
    assert not told.success and "in flight: 1" in told.message
    waiting = flush.future(request(timeout_s=60))
    call.cancel()
    assert waiting.result().success
    for wrong in (-1.0, float("nan"), float("inf")):
        with pytest.raises(grpc.RpcError) as caught:
            flush(request(timeout_s=wrong))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_a_caller_that_reads_nothing_is_let_go(worker: Worker) -> None:
    wire = worker.vllm.request(worker.tokens("talk"), stream=True, n=8, logprobs=100)
    small = [("grpc.use_local_subchannel_pool", 1), ("grpc.http2.bdp_probe", 0)]
    with grpc.insecure_channel(worker.address, options=small) as channel:
        call = channel.unary_stream("/vllm.grpc.engine.VllmEngine/Generate")
        answers = call(wire.SerializeToString())
        next(answers)
        _until(lambda: worker.server.status()["requests"] == [])
        with pytest.raises(grpc.RpcError) as caught:
            list(answers)
        assert caught.value.code() is grpc.StatusCode.CANCELLED
    assert "has not read for" in worker.server.log()


def test_the_tokenizer_comes_in_chunks_with_its_fingerprint_on_the_last(engine: Engine) -> None:
    chunks = list(engine.stub.GetTokenizer(common.GetTokenizerRequest()))
    data = b"".join(c.data for c in chunks)
    assert [c.sha256 for c in chunks[:-1]] == [""] * (len(chunks) - 1)
    assert chunks[-1].sha256 == hashlib.sha256(data).hexdigest()
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        names = archive.namelist()
        assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} <= set(names)
        assert not any("safetensors" in n or ".." in n or n.startswith("/") for n in names)
        assert json.loads(archive.read("tokenizer.json"))["model"]


def test_the_worker_says_what_it_is(worker: Worker, engine: Engine) -> None:
    info = engine.stub.GetModelInfo(engine.pb.GetModelInfoRequest())
    assert info.served_model_name == "script" and info.model_type == "scripted"
    assert info.is_generation and info.max_context_length == 65536
    assert list(info.eos_token_ids) == worker.ids("<|im_end|>")
    server = engine.stub.GetServerInfo(engine.pb.GetServerInfoRequest())
    assert server.server_type == ("vllm-grpc" if engine is worker.vllm else "mlx-grpc")
    assert server.uptime_seconds > 0 and server.active_requests == 0
    if engine is worker.vllm:
        assert server.block_size == 16 and server.max_num_seqs == 8
        assert json.loads(info.default_sampling_params_json)["temperature"] == 1.0
    health = engine.stub.HealthCheck(engine.pb.HealthCheckRequest())
    assert health.healthy and health.message == "ready"


def test_grpcs_own_health_and_reflection_are_there(worker: Worker) -> None:
    stub = health_pb2_grpc.HealthStub(worker.channel)
    serving = health_pb2.HealthCheckResponse.SERVING
    names = ("vllm.grpc.engine.VllmEngine", "mlx.grpc.engine.MlxEngine")
    for service in ("", *names):
        assert stub.Check(health_pb2.HealthCheckRequest(service=service)).status == serving
    with pytest.raises(grpc.RpcError) as caught:
        stub.Check(health_pb2.HealthCheckRequest(service="sglang.grpc.scheduler.SglangScheduler"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    watch = stub.Watch(health_pb2.HealthCheckRequest())
    assert next(watch).status == serving
    watch.cancel()
    listed = reflection_pb2_grpc.ServerReflectionStub(worker.channel).ServerReflectionInfo(
        iter([reflection_pb2.ServerReflectionRequest(list_services="")])
    )
    found = {s.name for s in next(listed).list_services_response.service}
    assert found >= {*names, "grpc.health.v1.Health"}


def test_a_stream_goes_on_after_its_engine_died(worker: Worker, engine: Engine) -> None:
    whole = engine.one(worker.tokens("talk"), stream=True, max_tokens=400).tokens
    call = engine.stub.Generate(engine.request(worker.tokens("talk"), stream=True, max_tokens=400))
    tokens = list(next(call).chunk.token_ids)
    worker.server.kill_engine()
    for message in call:
        tokens += message.chunk.token_ids
    assert tokens == whole
    _until(lambda: engine.stub.HealthCheck(engine.pb.HealthCheckRequest()).healthy)


def _matched(complete: Any) -> Any:
    """A stop token that was told."""
    if "matched_stop_token_id" in complete.DESCRIPTOR.fields_by_name:
        there = complete.HasField("matched_stop_token_id")
        return complete.matched_stop_token_id if there else None
    kind = complete.WhichOneof("matched_stop")
    return getattr(complete, kind) if kind else None


def _requests(worker: Worker) -> list[dict[str, Any]]:
    return list(worker.server.status()["requests"])


def _until(true: Callable[[], bool]) -> None:
    assert until(true)
