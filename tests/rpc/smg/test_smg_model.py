"""The worker with a real model: logprobs, seeds, forms, what the cache gave, and what is told of it."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Iterator
from typing import Any

import jsonschema
import pytest
from conftest import PATIENCE
from rpc.smg.worker_calls import Worker, serving, vllm
from smg_grpc_proto.generated import common_pb2

common: Any = common_pb2
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "count": {"type": "integer"}},
    "required": ["city", "count"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with serving("--smg-engine", "both") as found:
        yield found
        assert "Traceback" not in found.server.log()


@pytest.mark.parametrize("top", [0, 3])
@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_are_those_of_http_also_without_alternatives(
    worker: Worker, top: int, stream: bool
) -> None:
    prompt = worker.tokens("Name a colour.")
    body = {
        "input_ids": prompt,
        "sampling_params": {"temperature": 0, "max_new_tokens": 6},
        "return_logprob": True,
        "top_logprobs_num": top,
    }
    meta = worker.http.post("/generate", json=body).json()["meta_info"]
    for engine in (worker.vllm, worker.mlx):
        answer = engine.one(prompt, stream=stream, max_tokens=6, logprobs=top)
        parts = [p.output_logprobs for p in answer.chunks or [answer.complete]]
        scores = [(s, t) for p in parts for s, t in zip(p.token_logprobs, p.token_ids, strict=True)]
        expected = [(s, t) for s, t, _ in meta["output_token_logprobs"]]
        assert [t for _, t in scores] == [t for _, t in expected][: len(scores)] == answer.tokens
        assert all(
            math.isclose(a, b, abs_tol=1e-3)
            for (a, _), (b, _) in zip(scores, expected, strict=False)
        )
        tops = [t for p in parts for t in p.top_logprobs]
        assert [len(t.token_ids) for t in tops] == ([top] * len(scores) if top else [])


def test_without_the_field_there_are_no_logprobs(worker: Worker) -> None:
    for engine in (worker.vllm, worker.mlx):
        complete = engine.one(worker.tokens("Name a colour."), max_tokens=3).complete
        assert not complete.HasField("output_logprobs")


def test_a_prompt_is_scored_with_its_answer_and_without_one(worker: Worker) -> None:
    prompt = worker.tokens("Name a colour.")
    for cap in (0, 2):
        complete = worker.vllm.one(prompt, max_tokens=cap, prompt_logprobs=1).complete
        scores = complete.input_logprobs
        assert list(scores.token_ids) == prompt and len(scores.token_logprobs) == len(prompt)
        assert not scores.token_logprobs[0].HasField("value")
        assert all(s.HasField("value") and s.value <= 0 for s in scores.token_logprobs[1:])
        assert [len(t.token_ids) for t in scores.top_logprobs] == [0] + [1] * (len(prompt) - 1)
        assert len(complete.output_ids) == complete.completion_tokens == cap
    first, *rest = worker.vllm.one(prompt, stream=True, max_tokens=3, prompt_logprobs=0).chunks
    assert list(first.input_logprobs.token_ids) == prompt
    assert not any(chunk.HasField("input_logprobs") for chunk in rest)


def test_a_seed_means_the_same_alone_and_in_company(worker: Worker) -> None:
    prompt = worker.tokens("Tell me a story.")
    said: dict[str, Any] = {"temperature": 1.0, "seed": -7, "max_tokens": 12}
    alone = worker.vllm.one(prompt, **said).tokens
    assert worker.mlx.one(prompt, **said).tokens == alone
    several = worker.vllm.ask(prompt, n=3, **said)
    assert several[0].tokens == alone
    assert len({tuple(a.tokens) for a in several}) == 3
    assert worker.vllm.one(prompt, temperature=1.0, seed=8, max_tokens=12).tokens != alone


@pytest.mark.parametrize("stream", [False, True])
def test_every_form_that_is_accepted_is_enforced(worker: Worker, stream: bool) -> None:
    prompt = worker.tokens("Hello!")

    def said(**form: Any) -> str:
        answer = worker.vllm.one(prompt, stream=stream, max_tokens=80, **form)
        assert answer.complete.finish_reason == "stop"
        return worker.text(answer.tokens)

    jsonschema.validate(json.loads(said(json_schema=json.dumps(SCHEMA))), SCHEMA)
    assert said(regex="[0-9]{3}-[a-c]{2}")[3] == "-"
    assert said(grammar='root ::= "yes" | "no"') in ("yes", "no")
    assert said(choice=vllm.ChoiceConstraint(choices=["left", "right"])) in ("left", "right")
    assert not said(json_object=False).startswith("{")


def test_parameters_reach_the_sampler(worker: Worker) -> None:
    prompt = worker.tokens("Name a colour.")
    for engine in (worker.vllm, worker.mlx):
        plain = engine.one(prompt, max_tokens=1).tokens
        biased = engine.one(prompt, max_tokens=1, logit_bias={plain[0]: -100.0}).tokens
        assert plain != biased
        assert engine.one(prompt, max_tokens=1, temperature=5.0, top_k=1).tokens == plain


def test_a_long_prompt_is_cut_to_what_the_request_says(worker: Worker) -> None:
    prompt = [*worker.ids("forget this part. ") * 10, *worker.tokens("Name a colour.")]
    cut = worker.vllm.one(prompt, max_tokens=4, truncate_prompt_tokens=20).complete
    assert cut.prompt_tokens == 20
    assert list(cut.output_ids) == worker.vllm.one(prompt[-20:], max_tokens=4).tokens


def test_what_the_cache_gave_is_told_and_what_it_holds_is_streamed(worker: Worker) -> None:
    calls = [
        worker.vllm.stub.SubscribeKvEvents(common.SubscribeKvEventsRequest(), timeout=PATIENCE)
        for _ in range(2)
    ]
    first = next(calls[0])
    assert first.snapshot.count >= 1 and first.events[0].WhichOneof("data") == "cleared"
    prompt = worker.tokens("A prompt that nobody asked before. " * 8)
    cold = worker.vllm.one(prompt, max_tokens=2).complete
    again = worker.vllm.one(prompt, max_tokens=2).complete
    assert again.cached_tokens == len(prompt) - 1 > cold.cached_tokens
    wanted = {tuple(prompt[i : i + 16]) for i in range(0, len(prompt) - 16, 16)}
    seen, number = _blocks_until(itertools.chain([first], calls[0]), wanted)
    late, _ = _blocks_until(calls[1], wanted)
    assert wanted <= seen.keys() and wanted <= late.keys()
    resumed = worker.vllm.stub.SubscribeKvEvents(
        common.SubscribeKvEventsRequest(start_sequence_number=number), timeout=PATIENCE
    )
    assert next(resumed).sequence_number == number
    ahead = worker.vllm.stub.SubscribeKvEvents(
        common.SubscribeKvEventsRequest(start_sequence_number=2**63), timeout=PATIENCE
    )
    assert next(ahead).HasField("snapshot")
    assert worker.vllm.stub.FlushCache(common.FlushCacheRequest()).success
    for batch in calls[0]:
        if any(e.WhichOneof("data") == "cleared" for e in batch.events):
            break
    assert worker.vllm.one(prompt, max_tokens=2).complete.cached_tokens == 0
    for call in (*calls, resumed, ahead):
        call.cancel()


def _blocks_until(
    call: Iterable[Any], wanted: set[tuple[int, ...]]
) -> tuple[dict[tuple[int, ...], int], int]:
    """The blocks that were told, up to all that are wanted, and the last batch that told any."""
    found: dict[tuple[int, ...], int] = {}
    number = 0
    for batch in call:
        if batch.HasField("load"):
            assert batch.load.load_only and batch.load.max_running_requests == 32
        assert batch.sequence_number >= number
        for event in batch.events:
            number = batch.sequence_number
            for block in event.stored.blocks:
                assert block.block_size == len(block.token_ids) == 16
                found[tuple(block.token_ids)] = block.block_hash
        if wanted <= found.keys():
            return found, number
    raise AssertionError("the stream ended")
