"""LocalAI's Backend service: each call carried out on the one model, and answered."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

import grpc

from millrace.errors import MillraceError
from millrace.rpc import status
from millrace.rpc.localai import encoding, scoring, wire
from millrace.rpc.localai.answering import Replies
from millrace.rpc.localai.asking import (
    BackendRequest,
    asked_of,
    conversation_of,
    is_chat,
    refuse_media,
)
from millrace.rpc.localai.holder import HeldModel, Holder
from millrace.rpc.localai.loading import plan_of
from millrace.rpc.localai.settings import Name
from millrace.rpc.protofile import Method
from millrace.serving.dispatch import Origin, run
from millrace.serving.ignored import HEADER, in_a_header
from millrace.serving.model import ServedModel
from millrace.serving.pictures import prepared, words_in
from millrace.serving.request import check_tokens
from millrace.serving.running import Running
from millrace.text.conversation import Conversation, ConversationTurn

log = logging.getLogger("millrace.rpc")

LOADED: dict[Name, str] = {
    "mlx": "MLX model loaded successfully",
    "mlx-vlm": "MLX-VLM model loaded successfully",
    "mlx-distributed": "Model loaded successfully",
}
"""What LocalAI's own tests expect of each of its backends."""
_NOT_LOADED = "Error loading MLX model: "
_MOST_INT = 2**31 - 1


class Backend:
    def __init__(self, holder: Holder, name: Name) -> None:
        self._holder = holder
        self._name: Name = name
        self._rate = 0.0
        """Tokens per second of the answer that ended last."""

    def handlers(self) -> grpc.GenericRpcHandler:
        found = {method.name: self._handler(method) for method in wire.METHODS}
        return grpc.method_handlers_generic_handler(wire.SERVICE, found)

    def _handler(self, method: Method) -> grpc.RpcMethodHandler[Any, Any]:
        own: Callable[..., Any] = getattr(self, _snake(method.name))
        kind: Callable[..., grpc.RpcMethodHandler[Any, Any]] = (
            grpc.unary_stream_rpc_method_handler
            if method.streams
            else grpc.unary_unary_rpc_method_handler
        )
        return kind(own, method.request.FromString, method.answer.SerializeToString)

    async def health(self, message: Any, context: Any) -> Any:
        return wire.Reply(message=b"OK")

    async def load_model(self, message: Any, context: Any) -> Any:
        """Never an error of the call: what is wrong is told in the result."""
        try:
            plan = await asyncio.to_thread(plan_of, message, self._holder.base)
            await self._holder.load(plan)
        except MillraceError as error:
            log.error("%s%s", _NOT_LOADED, error.message)
            return wire.Result(success=False, message=_NOT_LOADED + status.text_of(error))
        except Exception as error:
            log.exception("a model could not be loaded")
            text = f"{_NOT_LOADED}{type(error).__name__}: {error}"
            return wire.Result(success=False, message=text[:2000])
        return wire.Result(success=True, message=LOADED[self._name])

    async def free(self, message: Any, context: Any) -> Any:
        freed = await self._holder.free()
        return wire.Result(
            success=True, message="Model released" if freed else "No model was loaded"
        )

    async def predict(self, message: Any, context: Any) -> Any:
        async with self._running(message, context, "Predict") as replies:
            return await replies.whole()

    async def predict_stream(self, message: Any, context: Any) -> AsyncGenerator[Any, None]:
        async with self._running(message, context, "PredictStream") as replies:
            async for reply in replies.streamed():
                yield reply

    @contextlib.asynccontextmanager
    async def _running(self, message: Any, context: Any, method: str) -> AsyncIterator[Replies]:
        async with self._holder.asked(message.ModelIdentity) as (held, model):
            asked: BackendRequest = await asked_of(message, held, model)
            running: Running = run(model, asked.request, _origin(method))
            if asked.ignored:
                context.set_trailing_metadata(((HEADER, in_a_header(asked.ignored)),))
            replies = Replies(
                running,
                model.tokenizer.vocabulary,
                logprobs=asked.request.logprobs is not None,
            )
            try:
                yield replies
            finally:
                running.close()
                self._rate = replies.rate or self._rate

    async def tokenize_string(self, message: Any, context: Any) -> Any:
        refuse_media(message)
        async with self._holder.asked(message.ModelIdentity) as (_, model):
            if is_chat(message):
                tokens = await prepared(
                    model.pictures,
                    lambda: conversation_of(message),
                    lambda chat: model.render(chat).tokens,
                )
            else:
                found = await asyncio.to_thread(model.encode, [message.Prompt], special=True)
                tokens = found[0]
        return wire.TokenizationResponse(length=len(tokens), tokens=tokens)

    async def detokenize(self, message: Any, context: Any) -> Any:
        def write(model: ServedModel) -> str:
            ids = list(message.tokens)
            check_tokens("tokens", ids, model.width)
            return model.tokenizer.decode(ids, skip_special=False)

        async with self._holder.asked() as (_, model):
            text = await asyncio.to_thread(write, model)
        return wire.DetokenizeResponse(content=text)

    async def embedding(self, message: Any, context: Any) -> Any:
        async with self._holder.asked(message.ModelIdentity) as (_, model):
            return await encoding.embed(message, model, _origin("Embedding"))

    async def rerank(self, message: Any, context: Any) -> Any:
        async with self._holder.asked(message.ModelIdentity) as (_, model):
            return await encoding.rerank(message, model, _origin("Rerank"))

    async def score(self, message: Any, context: Any) -> Any:
        async with self._holder.asked(message.ModelIdentity) as (_, model):
            return await scoring.score(message, model, _origin("Score"))

    async def status(self, message: Any, context: Any) -> Any:
        held = self._holder.held
        return wire.StatusResponse(state=self._state(held), memory=_memory(held))

    def _state(self, held: HeldModel | None) -> int:
        if held is None:
            return wire.BUSY if self._holder.is_changing else wire.UNINITIALIZED
        if not held.is_well:
            return wire.ERROR
        client = held.client
        return wire.BUSY if client is not None and client.in_flight else wire.READY

    async def get_metrics(self, message: Any, context: Any) -> Any:
        """What the model has done so far, and how fast its last answer was made."""
        held = self._holder.held
        client = held.client if held is not None else None
        if client is None:
            return wire.MetricsResponse()
        totals = client.metrics.totals
        return wire.MetricsResponse(
            tokens_per_second=self._rate,
            tokens_generated=min(_MOST_INT, totals.generated_tokens),
            prompt_tokens_processed=min(_MOST_INT, totals.prompt_tokens - totals.cached_tokens),
        )

    async def model_metadata(self, message: Any, context: Any) -> Any:
        def read(model: ServedModel) -> Any:
            told = wire.ModelMetadataResponse()
            if model.is_encoder:
                return told
            if (words := words_in(model.tokenizer.folder)) is not None:
                told.media_marker = words.placeholder
            if model.tokenizer.template_source is not None:
                chat = Conversation([ConversationTurn(role="user", content="Hello")], thinking=True)
                told.supports_thinking = model.dialect.thinks
                told.rendered_template = model.render(chat).text
            return told

        async with self._holder.asked() as (_, model):
            return await asyncio.to_thread(read, model)


def _origin(method: str) -> Origin:
    return Origin(endpoint=f"/{wire.SERVICE}/{method}")


def _memory(held: HeldModel | None) -> Any:
    client = held.client if held is not None else None
    memory = client.memory if client is not None else None
    if client is None or memory is None:
        return wire.MemoryUsageData()
    ready = client.ready
    parts = {"active": memory.active, "cached": memory.cached, "peak": memory.peak}
    if ready is not None:
        parts |= {"weights": ready.weight_bytes, "kv_budget": ready.kv_budget}
    return wire.MemoryUsageData(total=memory.active + memory.cached, breakdown=parts)


def _snake(name: str) -> str:
    """`PredictStream` as `predict_stream`."""
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in name).lstrip("_")
