"""The Python API: a model in this process, driven by the same engine and the same front core.

from millrace import LLM

with LLM() as llm:
    print(llm.generate("The capital of France is", max_tokens=8).text)
    for piece in llm.stream([{"role": "user", "content": "Tell me a story."}]):
        print(piece, end="", flush=True)
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import secrets
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any, get_args, overload

from millrace.config import AdapterConfig, EngineConfig, Task, Weights
from millrace.errors import EngineUnavailable, ModelNotFound
from millrace.protocol import Encoded
from millrace.serving.drafts import specprefill_of, with_draft
from millrace.serving.encodings import EncodingRun, numbers
from millrace.serving.fold import fold
from millrace.serving.local_model import LocalModel
from millrace.serving.pictures import prepared
from millrace.serving.request import Request
from millrace.serving.running import Running
from millrace.serving.sampling_fields import SamplingFields, fill
from millrace.text.conversation import Conversation, turn_of
from millrace.text.deltas import Content, Delta
from millrace.text.inputs import Cut
from millrace.text.loops import AnswerLoop
from millrace.text.reading import CallsInText, SplitText, parse_tool_calls, split_reasoning

Message = dict[str, Any]
Prompt = str | list[Message]
"""A text to continue, or a conversation to answer."""
_LONGEST_PATH = 1024
"""Characters; longer ones are the picture itself."""


@dataclass(frozen=True)
class Output:
    text: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    finish_details: AnswerLoop | None = None
    """The repetition at which the loop guard ended it, if it did."""


class LLM:
    """A model loaded in this process. Close it, or use it as a context manager."""

    def __init__(
        self,
        model: str | None = None,
        *,
        weights: Weights = "auto",
        context: int | None = None,
        max_running: int | None = None,
        prefill_chunk: int | None = None,
        task: Task = "auto",
        pooling: str | None = None,
        trust_remote_code: bool = False,
        adapters: Mapping[str, str] | None = None,
        specprefill_draft: str | None = None,
        specprefill: bool = False,
        specprefill_threshold: int | None = None,
        specprefill_keep_pct: float | None = None,
    ) -> None:
        """`task` embed or rerank makes a decoder an encoder; models that are one need no word.
        `adapters` are folders by the names that `generate` is given. The options of SpecPrefill are those
        of `millrace serve`."""
        from millrace.models.resolve import resolve

        for name, given, known in (("weights", weights, Weights), ("task", task, Task)):
            if given not in get_args(known):
                raise ValueError(f"{name} is one of {', '.join(get_args(known))}, not {given!r}")
        found = resolve(model)
        sparse = specprefill_draft, specprefill, specprefill_threshold, specprefill_keep_pct
        config = EngineConfig(
            model=str(found.path),
            name=found.name,
            weights=weights,
            context=context,
            max_running=max_running,
            prefill_chunk=prefill_chunk,
            task=task,
            pooling=pooling,
            trust_remote_code=trust_remote_code,
            adapters=tuple(
                AdapterConfig(name=name, path=str(Path(path).expanduser().absolute()))
                for name, path in (adapters or {}).items()
            ),
            specprefill=specprefill_of(*sparse),
        )
        self._host = LocalModel(with_draft(config))
        self._model = self._host.model
        # One that nobody holds any more ends; whoever collects it does not wait for that.
        weakref.finalize(self, self._host.leave).atexit = False

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the engine and whatever waits for it. A program that ends does it for what is left open."""
        self._host.close()

    @property
    def name(self) -> str:
        return self._model.name

    @property
    def context_window(self) -> int:
        return self._model.window

    @overload
    def generate(self, prompt: str, **options: Any) -> Output: ...
    @overload
    def generate(self, prompt: list[Message], **options: Any) -> Output: ...
    @overload
    def generate(self, prompt: Sequence[Prompt], **options: Any) -> list[Output]: ...
    def generate(self, prompt: Any, **options: Any) -> Output | list[Output]:
        """Answer one prompt, or several at once in one batch.

        Options: temperature, top_p, top_k, min_p, typical_p, the penalties, logit_bias, min_tokens,
        bad_words, seed, max_tokens, stop, stop_token_ids, ignore_eos, loop_guard, priority, timeout,
        specprefill, specprefill_keep_pct; and adapter, the name of one of those that the model was
        loaded with. What is left out is the model's own default.
        """
        return self._host.call(self._generate(prompt, options))

    @overload
    def embed(self, texts: str, **options: Any) -> list[float]: ...
    @overload
    def embed(self, texts: Sequence[str], **options: Any) -> list[list[float]]: ...
    def embed(self, texts: Any, **options: Any) -> list[float] | list[list[float]]:
        """A text's vector, or one for each of several texts, run together.

        Options: prompt_name, input_type (query or document), dimensions, normalize, and truncate
        (True cuts what is too long, which is refused otherwise). Lists of token ids are texts, too.
        """
        found = self._host.call(self._embed(texts, **options))
        return found[0] if isinstance(texts, str) else found

    def rerank(self, query: str, documents: Sequence[str]) -> list[tuple[int, float]]:
        """How well documents answer a query: their numbers and scores, best first."""
        return self._host.call(self._rerank(query, documents))

    def split_reasoning(self, text: str) -> SplitText:
        """What this model thought in a text of its own, and what it said."""
        return split_reasoning(text, self._model.dialect.format)

    def parse_tool_calls(self, text: str, tools: Sequence[dict[str, Any]]) -> CallsInText:
        """The calls of these tools in a text of this model's, and what else it says."""
        return parse_tool_calls(text, tools, self._model.dialect.format)

    async def agenerate(self, prompt: Any, **options: Any) -> Output | list[Output]:
        """`generate` for asyncio, on whatever loop the caller runs."""
        return await asyncio.wrap_future(self._host.start(self._generate(prompt, options)))

    def stream(self, prompt: Prompt, **options: Any) -> Iterator[str]:
        """The answer's text as it is made. Leaving the loop early stops the generation."""
        queue: SimpleQueue[str | BaseException | None] = SimpleQueue()
        work = self._host.start(self._pump(prompt, options, queue.put))
        try:
            while (item := queue.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            work.cancel()

    async def astream(self, prompt: Prompt, **options: Any) -> AsyncIterator[str]:
        """`stream` for asyncio, on whatever loop the caller runs."""
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[str | BaseException | None] = asyncio.Queue()

        def put(item: str | BaseException | None) -> None:
            with contextlib.suppress(RuntimeError):  # the caller's loop is closed
                loop.call_soon_threadsafe(queue.put_nowait, item)

        work = self._host.start(self._pump(prompt, options, put))
        try:
            while (item := await queue.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            work.cancel()

    async def _embed(
        self,
        texts: str | Sequence[str] | Sequence[list[int]],
        *,
        prompt_name: str | None = None,
        input_type: str | None = None,
        dimensions: int | None = None,
        normalize: bool | None = None,
        truncate: bool = False,
    ) -> list[list[float]]:
        encodings = self._model.encodings
        encodings.need_vectors()
        size = encodings.check_dimensions(dimensions)
        prompt = encodings.prompt(prompt_name, input_type)
        given: list[Any] = [texts] if isinstance(texts, str) else list(texts)
        if not given:
            return []
        cut: Cut = "right" if truncate else "none"
        strings = [t for t in given if isinstance(t, str)]
        if strings:
            if len(strings) < len(given):
                raise TypeError("embed() takes texts or lists of token ids, not both at once")
            inputs = await asyncio.to_thread(encodings.texts, strings, prompt=prompt, cut=cut)
        else:
            inputs = encodings.tokens([list(t) for t in given], cut=cut)
        found = await self._encoded(
            encodings.run(secrets.token_hex(8), inputs, normalize=normalize, dimensions=size)
        )
        return [numbers(e) for e in found]

    async def _rerank(self, query: str, documents: Sequence[str]) -> list[tuple[int, float]]:
        encodings = self._model.encodings
        encodings.need_scores()
        if not documents:
            return []
        queries = [query] * len(documents)
        inputs = await asyncio.to_thread(encodings.pairs, queries, documents)
        id, kind = secrets.token_hex(8), encodings.scoring
        found = await self._encoded(encodings.run(id, inputs, kind, normalize=True))
        scores = encodings.scores(found, queries)
        return sorted(enumerate(scores), key=lambda pair: -pair[1])

    async def _encoded(self, running: EncodingRun) -> list[Encoded]:
        try:
            return await running.found()
        finally:
            running.close()

    async def _generate(self, prompt: Any, options: dict[str, Any]) -> Output | list[Output]:
        if isinstance(prompt, str) or (prompt and isinstance(prompt[0], dict)):
            return await self._one(prompt, options)
        return list(await asyncio.gather(*(self._one(p, options) for p in prompt)))

    async def _one(self, prompt: Prompt, options: dict[str, Any]) -> Output:
        running = await self._run(prompt, options)
        try:
            answers, usage = await fold(running.events(), running.n)
        finally:
            running.close()
        finish = answers[0].finish
        return Output(
            text=answers[0].content,
            finish_reason=finish.reason if finish else "stop",
            prompt_tokens=usage.prompt,
            completion_tokens=usage.completion,
            finish_details=finish.loop if finish else None,
        )

    async def _run(self, prompt: Prompt, options: dict[str, Any]) -> Running:
        options, model = dict(options), self._model
        if (name := options.pop("adapter", None)) is not None:
            known = model.client.adapters.list
            if (adapter := known.get(name)) is None:
                raise ModelNotFound(name, [a.name for a in known.all()])
            model = model.adapted(adapter)
        id = secrets.token_hex(8)
        if isinstance(prompt, str):
            tokens = await asyncio.to_thread(model.text_prompt, prompt)
            request = Request(id=id, prompt=tokens)
        else:
            messages = prompt
            request = await prepared(
                model.pictures,
                lambda: Conversation([turn_of(_shown(m)) for m in messages]),
                lambda chat: model.chat(id, chat),
            )
        return model.run(self._filled(request, options))

    async def _pump(
        self,
        prompt: Prompt,
        options: dict[str, Any],
        put: Callable[[str | BaseException | None], None],
    ) -> None:
        try:
            running = await self._run(prompt, options)
            try:
                async for event in running.events():
                    if isinstance(event, Delta) and isinstance(event.piece, Content):
                        put(event.piece.text)
            finally:
                running.close()
            put(None)
        except Exception as error:
            put(error)
        except asyncio.CancelledError:
            put(EngineUnavailable("This LLM is closed."))  # or nobody listens any more
            raise

    def _filled(self, request: Request, options: dict[str, Any]) -> Request:
        model = self._model
        fields = {k: options.pop(k) for k in list(options) if k in SamplingFields.__struct_fields__}
        fields["logit_bias"] = {str(k): v for k, v in (fields.get("logit_bias") or {}).items()}
        fill(request, SamplingFields(**fields), model)
        for name, value in options.items():
            if name not in Request.__struct_fields__:
                raise TypeError(f"generate() has no option '{name}'")
            setattr(request, name, value)
        return request


def _shown(message: Message) -> Message:
    """A message whose pictures are told as requests tell them: a program has files and objects."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": [_picture(part) for part in content]}


def _picture(part: Any) -> Any:
    kind = "video" if isinstance(part, dict) and part.get("video") is not None else "image"
    shown = part.get(kind) if isinstance(part, dict) else None
    if isinstance(shown, str) and _is_path(shown):
        shown = Path(shown)
    if isinstance(shown, Path):
        return {"type": kind, kind: shown.expanduser().absolute().as_uri()}
    if shown is not None and hasattr(shown, "save"):  # Pillow's, which need not be there
        file = io.BytesIO()
        shown.save(file, "PNG", save_all=kind == "video")
        return {"type": kind, kind: file.getvalue()}
    return {**part, "type": kind} if shown is not None else part


def _is_path(text: str) -> bool:
    return len(text) < _LONGEST_PATH and Path(text).expanduser().is_file()
