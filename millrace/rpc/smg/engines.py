"""The two services that a gateway may know a worker by: each method a thin translation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any, NoReturn

from smg_grpc_proto.generated import common_pb2, mlx_engine_pb2, vllm_engine_pb2

from millrace.errors import MillraceError
from millrace.rpc.smg.blocks import SIZE
from millrace.rpc.smg.bundle import chunks
from millrace.rpc.smg.worker import Worker
from millrace.version import __version__

common: Any = common_pb2
_MOST = 2**31 - 1
VLLM = "vllm.grpc.engine.VllmEngine"
MLX = "mlx.grpc.engine.MlxEngine"


class NotServed(MillraceError):
    """A method of the protocol that this worker has no use for."""

    code = "not_implemented"
    status = 501


class _Engine(ABC):
    """What both have, in the messages of `pb`."""

    pb: Any
    name: str

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def _method(self, name: str) -> str:
        return f"/{self.name}/{name}"

    def _viewer(self, context: Any, method: str) -> str | None:
        return self._worker.callers.viewer(context, self._method(method))

    def Generate(self, wire: Any, context: Any) -> AsyncIterator[Any]:
        return self._worker.generate(self.pb, wire, context, self._method("Generate"))

    async def Abort(self, wire: Any, context: Any) -> Any:
        await self._worker.abort(wire.request_ids, self._viewer(context, "Abort"))
        return self.pb.AbortResponse()

    async def HealthCheck(self, _wire: Any, _context: Any) -> Any:
        trouble = self._worker.trouble()
        return self.pb.HealthCheckResponse(healthy=trouble is None, message=trouble or "ready")

    async def GetModelInfo(self, _wire: Any, context: Any) -> Any:
        return self.pb.GetModelInfoResponse(**await self._worker.facts())

    @abstractmethod
    async def GetServerInfo(self, _wire: Any, context: Any) -> Any:
        """What it is and does, in the words of the one that it stands for."""

    async def GetTokenizer(self, _wire: Any, context: Any) -> AsyncIterator[Any]:
        for data, fingerprint in chunks(await self._worker.bundle()):
            yield common.GetTokenizerChunk(data=data, sha256=fingerprint)


class MlxEngine(_Engine):
    pb = mlx_engine_pb2
    name = MLX

    async def GetServerInfo(self, _wire: Any, context: Any) -> Any:
        return self.pb.GetServerInfoResponse(
            server_type="mlx-grpc",
            active_requests=self._worker.active,
            uptime_seconds=self._worker.uptime,
        )


class VllmEngine(_Engine):
    pb = vllm_engine_pb2
    name = VLLM

    async def GetModelInfo(self, wire: Any, context: Any) -> Any:
        info = await super().GetModelInfo(wire, context)
        info.tokenizer_path = info.model_path
        info.default_sampling_params_json = await self._worker.sampling_defaults()
        return info

    async def GetServerInfo(self, _wire: Any, context: Any) -> Any:
        client = self._worker.client
        ready = client.ready if client is not None else None
        return self.pb.GetServerInfoResponse(
            server_type="vllm-grpc",
            active_requests=self._worker.active,
            is_paused=False,
            last_receive_timestamp=self._worker.heard,
            uptime_seconds=self._worker.uptime,
            data_parallel_size=1,
            block_size=SIZE,
            kv_cache_dtype="auto",
            model_dtype=ready.dtype if ready else "",
            max_num_seqs=self._worker.max_running,
            # A form is enforced from an answer's first token on.
            constrained_decoding_start="first_token",
        )

    async def Embed(self, wire: Any, context: Any) -> Any:
        vector, tokens = await self._worker.embed(wire, context, self._method("Embed"))
        return self.pb.EmbedResponse(
            embedding=vector, prompt_tokens=tokens, embedding_dim=len(vector)
        )

    async def GetLoads(self, wire: Any, context: Any) -> Any:
        loads = [] if wire.dp_rank else [self._scheduler_load()]
        return self.pb.GetLoadsResponse(
            timestamp=datetime.now(UTC).isoformat(),
            version=f"millrace {__version__}",
            dp_rank_count=1,
            loads=loads,
        )

    def _scheduler_load(self) -> Any:
        load = self._worker.load()
        return self.pb.SchedulerLoad(
            dp_rank=0,
            num_running_reqs=load.running,
            num_waiting_reqs=load.waiting,
            num_total_reqs=load.running + load.waiting,
            num_used_tokens=min(_MOST, load.used_tokens),
            max_total_num_tokens=min(_MOST, load.most_tokens),
            token_usage=load.usage,
            gen_throughput=load.throughput,
            cache_hit_rate=load.hit_rate,
            utilization=load.utilization,
            max_running_requests=load.most_running,
            num_waiting_uncached_tokens=min(_MOST, load.waiting_tokens),
        )

    async def FlushCache(self, wire: Any, context: Any) -> Any:
        if left := await self._worker.idle(wire.timeout_s):
            text = f"Requests are in flight: {left}. Their state would be kept anew."
            return common.FlushCacheResponse(success=False, message=text)
        there = await self._worker.flush()
        text = "The prefix cache was dropped." if there else "There is no prefix cache."
        return common.FlushCacheResponse(success=True, message=text)

    async def StartProfile(self, _wire: Any, _context: Any) -> NoReturn:
        raise NotServed("This worker has no profiler.")

    StopProfile = StartProfile

    async def SubscribeKvEvents(self, wire: Any, context: Any) -> AsyncIterator[Any]:
        # Token ids are prompts: what others sent is for those who may see it all.
        shows = self._viewer(context, "SubscribeKvEvents") is None
        start = wire.start_sequence_number
        async for batch in self._worker.events.subscribe(start, shows_tokens=shows):
            yield batch
