"""A worker with keys: which role each method needs, whose requests end, and who sees prompts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from api import tiny_folder
from conftest import PATIENCE, until
from rpc.smg.worker_calls import Worker, serving, vllm
from rpc.test_rpc_arrivals import half_sent
from smg_grpc_proto.generated import common_pb2

common: Any = common_pb2
ANN, BOB, ROOT = ((("authorization", f"Bearer sk-{who}"),) for who in ("ann", "bob", "root"))


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory, default_model: Path) -> Iterator[Worker]:
    folder = tiny_folder.make(tmp_path_factory.mktemp("smg-roles") / "tiny", default_model)
    keys = ("--api-key", "sk-ann", "--api-key", "sk-bob", "--admin-key", "sk-root")
    with serving(str(folder), "--name", "tiny", *keys, "--smg-engine", "both") as found:
        found.http.headers["authorization"] = "Bearer sk-root"
        yield found


def _generate(worker: Worker, prompt: list[int], metadata: Any, **said: Any) -> Any:
    return worker.vllm.stub.Generate(
        worker.vllm.request(prompt, **said), metadata=metadata, timeout=PATIENCE
    )


def test_the_cache_is_dropped_for_administrators_alone(worker: Worker) -> None:
    stub = worker.vllm.stub
    with pytest.raises(grpc.RpcError) as caught:
        stub.FlushCache(common.FlushCacheRequest(), metadata=ANN)
    assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
    assert "role 'admin'" in caught.value.details() and "--admin-key" in caught.value.details()
    for call in (stub.StartProfile, stub.StopProfile):
        request = (
            common.StartProfileRequest if call is stub.StartProfile else common.StopProfileRequest
        )
        for metadata, code in (
            ((), grpc.StatusCode.UNAUTHENTICATED),
            (ANN, grpc.StatusCode.PERMISSION_DENIED),
            (ROOT, grpc.StatusCode.UNIMPLEMENTED),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                call(request(), metadata=metadata)
            assert caught.value.code() is code
    assert stub.FlushCache(common.FlushCacheRequest(), metadata=ROOT).success


def test_calls_without_a_known_key_take_no_place_of_those_whose_message_arrives(
    worker: Worker,
) -> None:
    port = int(worker.address.rpartition(":")[2])
    with contextlib.ExitStack() as stack:
        for key in ("nobody", ""):
            for method in ("Generate", "GetModelInfo"):
                for _ in range(10):
                    path = f"/vllm.grpc.engine.VllmEngine/{method}"
                    stack.enter_context(half_sent(port, path, key))
        for _ in range(20):
            request = vllm.GetModelInfoRequest()
            assert worker.vllm.stub.GetModelInfo(request, metadata=ANN).vocab_size


@pytest.mark.parametrize("engine", ["vllm", "mlx"])
def test_a_key_aborts_its_own_requests_alone(worker: Worker, engine: str) -> None:
    service = getattr(worker, engine)
    wire = service.request([1, 2, 3], id="of-ann", stream=True, max_tokens=7000, ignore_eos=True)
    call = service.stub.Generate(wire, metadata=ANN, timeout=PATIENCE)
    next(call)
    abort = service.pb.AbortRequest(request_ids=["of-ann"])
    service.stub.Abort(abort, metadata=BOB)
    assert [r["id"] for r in worker.server.status()["requests"]] == ["of-ann"]
    next(call)
    service.stub.Abort(abort, metadata=ANN)
    assert list(call)[-1].complete.finish_reason == "abort"


def _stored(worker: Worker, metadata: Any, count: int) -> tuple[list[Any], list[Any], Any]:
    """Events up to as many blocks, the blocks, and the stream."""
    call = worker.vllm.stub.SubscribeKvEvents(
        common.SubscribeKvEventsRequest(), metadata=metadata, timeout=PATIENCE
    )
    events: list[Any] = []
    for batch in call:
        events += batch.events
        blocks = [b for e in events for b in e.stored.blocks]
        if len(blocks) >= count:
            return events, blocks, call
    raise AssertionError("the stream ended")


def test_token_ids_of_prompts_are_shown_to_administrators_alone(worker: Worker) -> None:
    stub = worker.vllm.stub
    stub.FlushCache(common.FlushCacheRequest(), metadata=ROOT)
    secret = list(range(1000, 1065))
    list(_generate(worker, secret, ANN, max_tokens=1))
    seen, shown, root = _stored(worker, ROOT, 4)
    _, hidden, bob = _stored(worker, BOB, 4)
    wanted = [tuple(secret[i : i + 16]) for i in range(0, 64, 16)]
    assert [tuple(b.token_ids) for b in shown[:4]] == wanted
    assert len(hidden) == len(shown) and all(not b.token_ids for b in hidden)
    assert all(b.block_size == 16 for b in hidden)
    # Hashes of tokens alone would let their reader test guesses.
    hashes = {b.block_hash for b in hidden}
    assert len(hashes) == len(hidden) and hashes.isdisjoint(b.block_hash for b in shown)
    # A subscriber who listens sees later blocks follow the first, and all of them go.
    more = [*secret, *range(2000, 2047)]
    list(_generate(worker, more, ANN, max_tokens=1))
    for call, known in ((root, {b.block_hash for b in shown}), (bob, hashes)):
        parents: set[int] = set()
        for batch in call:
            for event in batch.events:
                if event.stored.HasField("parent_block_hash"):
                    parents.add(event.stored.parent_block_hash)
                tokens = [t for b in event.stored.blocks for t in b.token_ids]
                assert call is root or not tokens
            if parents & known:
                break
        else:
            raise AssertionError("the stream ended")
        call.cancel()
    assert seen


def test_embeddings_and_answers_belong_to_their_key(worker: Worker) -> None:
    call = _generate(
        worker, [1, 2], BOB, id="of-bob", stream=True, max_tokens=7000, ignore_eos=True
    )
    next(call)
    ann = {"authorization": "Bearer sk-ann"}
    bob = {"authorization": "Bearer sk-bob"}
    assert worker.http.delete("/v1/requests/of-bob", headers=ann).status_code == 404
    assert worker.http.get("/v1/requests", headers=ann).json()["running"] == []
    assert worker.http.delete("/v1/requests/of-bob", headers=bob).status_code == 200
    assert list(call)[-1].complete.finish_reason == "abort"
    assert until(lambda: not worker.server.status()["requests"])


def test_what_a_worker_tells_of_itself_needs_any_key(worker: Worker) -> None:
    stub = worker.vllm.stub
    assert stub.HealthCheck(vllm.HealthCheckRequest()).healthy
    for call, request in (
        (stub.GetModelInfo, vllm.GetModelInfoRequest),
        (stub.GetServerInfo, vllm.GetServerInfoRequest),
        (stub.GetLoads, vllm.GetLoadsRequest),
    ):
        assert call(request(), metadata=ANN)
        with pytest.raises(grpc.RpcError) as caught:
            call(request())
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
