"""A model as the protocols see it: messages or text in, a stream of events out."""

from __future__ import annotations

import asyncio
import copy
import functools
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from millrace.caller import current_caller
from millrace.config import SpecPrefillConfig
from millrace.engine.rng import derive
from millrace.errors import BadRequest, ContextLengthExceeded
from millrace.models.encoders import Encoder
from millrace.models.window import read_config
from millrace.protocol import Choice, Submit
from millrace.serving.adapters import ServedAdapter
from millrace.serving.capability import Gives, check_gives
from millrace.serving.client import EngineClient
from millrace.serving.encodings import Encodings
from millrace.serving.pictures import ModelPictures
from millrace.serving.quotas import UsageQuota
from millrace.serving.request import Request, fit
from millrace.serving.running import Running
from millrace.serving.sampling_defaults import sampling_defaults
from millrace.serving.slices import SlicePace, in_slices
from millrace.serving.specprefill import sparse_of
from millrace.serving.workers import TextDesk
from millrace.text.conversation import Conversation
from millrace.text.fim import Infill, infill_of
from millrace.text.grammar import Demand
from millrace.text.pipeline import ChoicePipeline
from millrace.text.tasks import (
    ChatTask,
    CountTask,
    EncodeTask,
    FormTask,
    OpeningTask,
    PromptLength,
    RenderTask,
    TextSide,
    WrittenPrompt,
)


class ServedModel:
    def __init__(
        self,
        name: str,
        side: TextSide,
        client: EngineClient,
        defaults: Mapping[str, float] | None = None,
        template_arguments: Mapping[str, Any] | None = None,
        encoder: Encoder | None = None,
        pictures: ModelPictures | None = None,
        specprefill: SpecPrefillConfig | None = None,
        quota: UsageQuota | None = None,
    ) -> None:
        """`defaults` are the server's own, by the names of a request's fields; so are those of the
        template. `encoder` is what the model is where it makes no text; `specprefill` says how its draft
        is used, if it has one; `quota` is what all callers together are held to."""
        self.quota = quota
        self.pictures = pictures or ModelPictures(name, side.tokenizer.folder, None, None)
        self.name = name
        self._specprefill = specprefill
        self._template_arguments = dict(template_arguments or {})
        self._defaults = dict(defaults or {})
        self.tokenizer = side.tokenizer
        self.dialect = side.dialect
        self.client = client
        self.window = side.config.window
        self.created = int(time.time())
        self._desk = TextDesk(side)
        self.adapter: ServedAdapter | None = None
        """What its requests run with, beside the model's own weights."""
        self.base = name
        """The name of the model whose weights these are."""
        self._encodings: Encodings | None = None
        if encoder is not None:
            self._encodings = Encodings(name, encoder, self.tokenizer, client, self._desk, quota)

    @property
    def encodings(self) -> Encodings:
        """What it gives instead of text; raises that it gives none."""
        self.check_gives("numbers")
        assert self._encodings is not None
        return self._encodings

    @property
    def is_encoder(self) -> bool:
        return self._encodings is not None

    def need_text(self) -> None:
        """Raise that the model makes no text."""
        self.check_gives("text")

    def check_gives(self, wanted: Gives | None) -> None:
        """Raise that the model gives something else."""
        check_gives(self.name, self._encodings.facts if self._encodings else None, wanted)

    def adapted(self, adapter: ServedAdapter) -> ServedModel:
        """The same model with an adapter of its own, under that one's name."""
        other = copy.copy(self)
        other.name, other.created, other.adapter = adapter.name, adapter.created, adapter
        return other

    async def stop(self) -> None:
        """End the engine and whatever else runs for the model."""
        await self.client.stop()
        await asyncio.to_thread(self.release)

    def release(self) -> None:
        """End what runs besides the engine."""
        self._desk.close()
        self.pictures.close()

    @functools.cached_property
    def defaults(self) -> dict[str, Any]:
        """The sampling of a request that sets none."""
        return sampling_defaults(self.tokenizer.folder, self._defaults)

    @property
    def default_limit(self) -> int | None:
        """Tokens of an answer where a request says nothing; None is what the window leaves."""
        limit = self._defaults.get("max_tokens")
        return None if limit is None else int(limit)

    @property
    def default_loop_guard(self) -> bool:
        """Whether answers that repeat themselves end where a request says nothing."""
        return bool(self._defaults.get("loop_guard"))

    @functools.cached_property
    def infill(self) -> Infill | None:
        """How the model fills a gap between two texts; None if it was not taught to."""
        return infill_of(self.tokenizer)

    def _profiled(self, chat: Conversation) -> Conversation:
        """With what is set for the model where the request does not say otherwise."""
        chat = chat.without_sources()
        if not self._template_arguments:
            return chat
        said = self.dialect.controls.arguments(chat.thinking, chat.effort, chat.thinking_budget)
        ours = {k: v for k, v in self._template_arguments.items() if k not in said}
        switches = [n for n in ("enable_thinking", "thinking") if isinstance(ours.get(n), bool)]
        if chat.thinking is not None:
            ours = {k: v for k, v in ours.items() if k not in switches}
        elif switches:
            chat = replace(chat, thinking=ours[switches[0]])
        return replace(chat, template_arguments=ours | chat.template_arguments)

    def chat(self, id: str, chat: Conversation, demand: Demand | None = None) -> Request:
        """A conversation as a request: its prompt, and what its answer must look like.

        This and the following take a while for what is long: they are not for the event loop.
        """
        self.need_text()
        chat = self._profiled(chat)
        prompt = self._desk.run(
            ChatTask(
                chat=chat,
                demand=demand,
                boundaries=self._has_boundaries,
                borders=self._specprefill is not None,
            )
        )
        return Request(
            id=id,
            prompt=prompt.tokens,
            chat=chat,
            prompt_text=prompt.text,
            grammar=prompt.grammar,
            lazy_grammar=prompt.lazy_grammar,
            thinking=prompt.thinking,
            boundaries=prompt.boundaries,
            head=prompt.head,
            tail=prompt.tail,
            stripped=prompt.stripped,
            media=prompt.media,
            pictures=self.pictures.held([span.digest for span in prompt.media]),
        )

    def count(self, chat: Conversation, demand: Demand | None = None) -> PromptLength:
        """The length of a conversation's prompt, were it larger than the window."""
        return self._desk.run(CountTask(chat=self._profiled(chat), demand=demand))

    def opening(self, chat: Conversation) -> WrittenPrompt:
        """All that a conversation's prompt has before its first user's words."""
        return self._desk.run(OpeningTask(self._profiled(chat)))

    def render(self, chat: Conversation, *, special: bool = False) -> WrittenPrompt:
        """A conversation as the template writes it, whatever its length."""
        return self._desk.run(RenderTask(chat=self._profiled(chat), special=special))

    def encode(self, texts: list[str], *, special: bool) -> list[list[int]]:
        """Texts as tokens, whatever their number."""
        return self._desk.run(EncodeTask(texts=texts, special=special, fit=False))

    def text_prompts(self, texts: list[str]) -> list[list[int]]:
        """Raw prompts, each of which must have room in the window."""
        return self._desk.run(EncodeTask(texts=texts))

    def text_prompt(self, text: str) -> list[int]:
        return self.text_prompts([text])[0]

    def form(self, demand: Demand | None) -> str | None:
        """The grammar of an answer to a raw prompt."""
        return None if demand is None else self._desk.run(FormTask(demand))

    @property
    def _has_boundaries(self) -> bool:
        """Whether the engine has a use for them; one that is not up yet may have."""
        ready = self.client.ready
        return ready is None or ready.checkpoints

    def budget(self, request: Request) -> int:
        """How many tokens the request may make; raises if its prompt alone is too long."""
        if not request.prompt:
            raise BadRequest("The prompt is empty.", param="prompt")
        window = min(self.window, request.window or self.window)
        left = window - len(request.prompt)
        if left < 1:
            raise ContextLengthExceeded(len(request.prompt), window)
        return left if request.max_tokens is None else min(left, request.max_tokens)

    def run(self, request: Request) -> Running:
        """Hand the request to the engine; raises at once what is wrong with it."""
        self.need_text()
        submit = self._submit(request)
        self.client.admit(request.n)
        return self._start(request, submit)

    async def run_all(self, requests: Sequence[Request]) -> list[Running]:
        """Several requests, admitted all or none; raises what is wrong with any before one runs."""
        self.need_text()
        pace = SlicePace()
        submits: list[Submit] = []
        for request in requests:
            submits.append(self._submit(request))
            await pace.rest()
        started: list[Running] = []
        with self.client.expect(sum(r.n for r in requests)) as came:
            try:
                for request, submit in zip(requests, submits, strict=True):
                    started.append(self._start(request, submit))
                    came(request.n)
                    await pace.rest()
            except BaseException:
                in_slices(started, Running.close)
                raise
        return started

    @property
    def width(self) -> int:
        """How many logits the model has, and so how many token ids."""
        return self.client.ready.vocab_size if self.client.ready else self._stated_width

    @functools.cached_property
    def _stated_width(self) -> int:
        """As far as can be known before the engine is up."""
        settings = read_config(self.tokenizer.folder)
        for source in (settings, settings.get("text_config") or {}):
            if isinstance(size := source.get("vocab_size"), int):
                return size
        return len(self.tokenizer.vocabulary)

    def _submit(self, request: Request) -> Submit:
        if request.only_prompt:
            request.max_tokens = 1  # the engine scores a prompt on its way to a first token
        room = self.budget(request)
        fit(request, self.width, room)
        self.pictures.check(request.prompt, request.media)
        seed = secrets.randbits(63) if request.seed is None else request.seed
        ends = self.tokenizer.eos_ids | set(request.end_token_ids)
        if request.ignore_eos:
            ends = frozenset()
        return Submit(
            id=0,
            prompt=request.prompt,
            choices=[Choice(k, derive(seed, k) if k else seed) for k in range(request.n)],
            max_tokens=room,
            sampling=request.sampling,
            stop_ids=sorted(ends | (set(request.stop_token_ids) - set(self._watched(request)))),
            priority=request.priority,
            logprobs=request.logprobs,
            prompt_logprobs=request.prompt_logprobs,
            grammar=request.grammar,
            lazy_grammar=request.lazy_grammar,
            end_ids=sorted(self.tokenizer.eos_ids),
            thinking=request.thinking,
            cache_salt=request.cache_salt,
            boundaries=request.boundaries,
            media=request.media,
            sparse=sparse_of(request, self._specprefill),
            caller=current_caller.get(),
        )

    def _start(self, request: Request, submit: Submit) -> Running:
        # Not before: a slot that no request in flight needs may be given to another adapter.
        submit.adapter = self.client.adapters.slot_of(request.adapter or self.adapter)
        active = self.client.submit(
            request.id,
            submit,
            endpoint=request.endpoint,
            caller=request.caller,
            timeout=request.timeout,
        )
        if pictures := request.pictures:
            active.picture = lambda digest: self.pictures.picture(pictures[digest])
        pipelines = [self._pipeline(request) for _ in submit.choices]
        return Running(self.client, active, pipelines, request.only_prompt)

    def _watched(self, request: Request) -> list[int]:
        """Stop tokens that the front must look out for: the engine knows nothing of thoughts."""
        thoughts = request.chat is not None and self.dialect.thinks
        return request.stop_token_ids if thoughts and not request.stop_in_reasoning else []

    def _pipeline(self, request: Request) -> ChoicePipeline:
        parser = None
        if request.chat is not None:
            parser = self.dialect.parser(request.chat, request.prompt_text)
        return ChoicePipeline(
            self.tokenizer.vocabulary,
            parser=parser,
            stops=request.stops,
            include_stop=request.include_stop,
            stop_in_reasoning=request.stop_in_reasoning,
            stop_token_ids=request.stop_token_ids,
            watched_ids=self._watched(request),
            min_tokens=request.sampling.min_tokens,
            loop_guard=request.loop_guard,
            skip_special=request.skip_special_tokens,
        )
