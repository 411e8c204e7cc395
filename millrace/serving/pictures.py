"""A model's pictures: found for its conversations, run through its own processor, held while needed.

A picture is held once for all requests that show it, as the file that came, for as long as one of them
lives. What the engine is given for it is made when it is first seen, and again when it is wanted again.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar
from weakref import WeakValueDictionary

import msgspec

from millrace.errors import BadPicture, BadRequest, MillraceError, ModelError, RequestFailed
from millrace.fair_executor import FairExecutor
from millrace.media.processor import (
    FailedPicture,
    ProcessedPicture,
    ProcessorConfig,
    ProcessTask,
    RefusedPicture,
    reply_decoder,
)
from millrace.models.vision.families import image_token, vision_in
from millrace.models.window import read_config
from millrace.protocol import Span
from millrace.serving.media import MediaDesk, PictureFile
from millrace.sizes import format_bytes
from millrace.text.conversation import Conversation, ImagePart
from millrace.text.pictures import Expansion, PictureWords, expanded_tokens
from millrace.text.tokenizer import Tokenizer, added_tokens
from millrace.worker_pool import WorkerPool

log = logging.getLogger("millrace.serving")
T = TypeVar("T")
Modality = Literal["text", "image", "video"]
_PATIENCE = 120.0
"""Seconds that a picture may take, the start of the process included."""
_REMEMBERED = 4096
"""Pictures whose length in the prompt is known without running the processor."""


_UNNAMED = ("<IMG_CONTEXT>",)
"""Tokens of features that configurations do not name."""


class HeldPicture:
    """A picture that some request shows."""

    def __init__(self, file: PictureFile) -> None:
        self.file = file
        self.processed: ProcessedPicture | None = None
        """Until the engine has it."""


@dataclass(frozen=True)
class RawPrompt:
    """A prompt in tokens, with pictures in it."""

    tokens: list[int]
    media: list[Span] = field(default_factory=list)
    pictures: dict[str, HeldPicture] = field(default_factory=dict)


def words_in(folder: Path) -> PictureWords | None:
    """How a folder's model speaks of pictures; None if it takes none."""
    family = vision_in(folder)
    if family is None:
        return None
    token = image_token(read_config(folder))
    known = added_tokens(folder)
    if token is None:
        token = next((id for id, text in known.items() if text in _UNNAMED), None)
    if token is None or token not in known:
        raise ModelError(f"The tokenizer in {folder} has no token for pictures.")
    placeholder = family.placeholder or known[token]
    return PictureWords(placeholder, token, known[token], family.moving)


def takes_pictures(folder: Path) -> bool:
    """Whether a folder's model does; one that cannot be read takes none."""
    return "image" in takes_in(folder)


def takes_in(folder: Path) -> list[Modality]:
    """What a folder's model takes in."""
    try:
        return list(_takes(folder, (folder / "config.json").stat().st_mtime_ns))
    except (OSError, ModelError):
        return ["text"]


@functools.lru_cache(maxsize=256)
def _takes(folder: Path, modified: int) -> tuple[Modality, ...]:
    family = vision_in(folder)
    if family is None:
        return ("text",)
    return ("text", "image", "video") if family.moving else ("text", "image")


class ModelPictures:
    """What a model does with pictures; one without words for them refuses all."""

    def __init__(
        self,
        name: str,
        folder: Path,
        words: PictureWords | None,
        desk: MediaDesk | None,
        *,
        trust_remote_code: bool = False,
    ) -> None:
        self._name = name
        self.words = words
        self._desk = desk
        self._held: WeakValueDictionary[str, HeldPicture] = WeakValueDictionary()
        self._expansions: OrderedDict[str, Expansion] = OrderedDict()
        self._pool: WorkerPool | None = None
        if words is not None and desk is not None:
            config = ProcessorConfig(
                folder=str(folder),
                placeholder=words.placeholder,
                token=words.token,
                limits=desk.limits,
                trust_remote_code=trust_remote_code,
            )
            program = ["-m", "millrace.media.processor", msgspec.json.encode(config).decode()]
            self._pool = WorkerPool(program, most=1, work="picture")
            self._threads = FairExecutor(2, "processor", per_caller=1)

    @property
    def taken(self) -> bool:
        return self._pool is not None

    def open(self) -> None:
        """Have the processor's process started, so that the first picture need not wait for it."""
        if self._pool is not None:
            self._threads.submit(self._try)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._threads.shutdown(wait=False, cancel_futures=True)

    async def find(
        self, parts: Sequence[ImagePart], expansions: dict[str, Expansion]
    ) -> list[HeldPicture]:
        """Find pictures, and note in the parts what is known of them; what becomes of them is added to
        `expansions`. What is given back must be held until the request runs."""
        if not parts:
            return []
        desk = self._refuse(len(parts), parts[0])
        held: dict[tuple[str, bool, bool], HeldPicture] = {}
        fetched = 0
        for part in parts:
            key = part.source, part.low, part.moving
            if key not in held:
                try:
                    self._refuse_video(part)
                    file, came = await desk.find(part.source, low=part.low, moving=part.moving)
                    fetched += came
                    if fetched > desk.limits.most_fetched:
                        most = format_bytes(desk.limits.most_fetched)
                        raise BadPicture(f"The pictures are larger than {most} together.")
                    held[key] = self._hold(file)
                    expansions[file.digest] = await self._expansion(held[key])
                except BadRequest as error:
                    raise _placed(error, part) from error
            part.digest = held[key].file.digest
        return list(held.values())

    def _refuse(self, count: int, first: ImagePart) -> MediaDesk:
        if self._pool is None or self._desk is None:
            where, what = first.where or "messages", "video" if first.moving else "picture"
            raise BadRequest(
                f"{where}: the model '{self._name}' takes text only, and no {what}s. "
                f"Ask a vision model, or leave the {what} out.",
                param=where,
            )
        most = self._desk.limits.most
        if count > most:
            raise BadPicture(f"There are {count} pictures; {most} are the most (--max-pictures).")
        return self._desk

    def _refuse_video(self, part: ImagePart) -> None:
        if part.moving and self.words is not None and not self.words.moving:
            raise BadPicture(
                f"The model '{self._name}' takes pictures and no videos; show frames as pictures."
            )

    def _hold(self, file: PictureFile) -> HeldPicture:
        found = self._held.get(file.digest)
        if found is None:
            found = self._held[file.digest] = HeldPicture(file)
        return found

    async def placed(
        self, tokens: list[int], parts: Sequence[ImagePart], tokenizer: Tokenizer
    ) -> RawPrompt:
        """A raw prompt with pictures where their placeholders are."""
        if not parts:
            return RawPrompt(tokens)
        expansions: dict[str, Expansion] = {}
        held = await self.find(parts, expansions)
        words = self.words
        assert words is not None
        place, *more = await asyncio.to_thread(tokenizer.encode, words.placeholder)
        if more:
            raise BadRequest(
                f"Raw prompts of '{self._name}' have no places for pictures; show them in messages.",
                param="image_data",
            )
        own = {
            digest: await asyncio.to_thread(tokenizer.encode, expansion.text)
            for digest, expansion in expansions.items()
        }
        shown = [(p.digest, expansions[p.digest], own[p.digest]) for p in parts]
        found, media = await asyncio.to_thread(expanded_tokens, tokens, place, shown, words)
        return RawPrompt(found, media, {h.file.digest: h for h in held})

    def held(self, digests: Sequence[str]) -> dict[str, HeldPicture]:
        """Pictures that were gathered, and are held by whoever asks."""
        return {digest: self._held[digest] for digest in digests}

    def check(self, prompt: Sequence[int], media: Sequence[Span]) -> None:
        """Refuse tokens that stand for pictures where there are none."""
        if self.words is None or self.words.token not in prompt:
            return
        inside = sum(prompt[s.start : s.start + s.length].count(self.words.token) for s in media)
        if prompt.count(self.words.token) != inside:
            raise BadRequest(
                f"The prompt holds the token {self.words.token}, which stands for pictures, where "
                "there is none.",
                param="prompt",
            )

    async def _expansion(self, held: HeldPicture) -> Expansion:
        digest = held.file.digest
        if (known := self._expansions.get(digest)) is None:
            held.processed = made = await self._process(held.file)
            if not made.tokens:
                raise RequestFailed(
                    f"The processor of '{self._name}' gave no tokens for a picture: its files do not "
                    "belong together."
                )
            known = self._expansions[digest] = Expansion(made.text, made.tokens, made.grid)
            if len(self._expansions) > _REMEMBERED:
                self._expansions.popitem(last=False)
        self._expansions.move_to_end(digest)
        return known

    async def picture(self, held: HeldPicture) -> memoryview:
        """What the engine is given for a picture, as the message that it is sent."""
        made, held.processed = held.processed, None
        if made is None:
            made = await self._process(held.file)
        return made.picture

    async def _process(self, file: PictureFile) -> ProcessedPicture:
        loop = asyncio.get_running_loop()
        task = ProcessTask(file.digest, file.low, file.moving)
        return await loop.run_in_executor(self._threads, self._processed, task, file.data)

    def _processed(self, task: ProcessTask, data: bytes) -> ProcessedPicture:
        assert self._pool is not None
        reply = reply_decoder.decode(self._pool.run(task.parts(data), _PATIENCE))
        match reply:
            case ProcessedPicture():
                return reply
            case RefusedPicture(message=message):
                raise BadPicture(message)
            case FailedPicture(trace=trace):
                log.error("the processor of %s met an unexpected error\n%s", self._name, trace)
        raise RequestFailed("The server met an unexpected error in reading a picture.")

    def _try(self) -> None:
        try:
            self._processed(ProcessTask(), b"")
        except MillraceError as error:
            log.warning("%s: pictures cannot be read yet: %s", self._name, error.message)


def _placed(error: BadRequest, part: ImagePart) -> BadRequest:
    """The error with the part that it is about."""
    if part.where:
        error.message = f"{part.where}: {error.message}"
        error.args = (error.message,)
        error.param = part.where
    return error


async def prepared(
    pictures: ModelPictures,
    build: Callable[[], Conversation],
    finish: Callable[[Conversation], T],
) -> T:
    """What `finish` makes of a conversation, both on threads, its pictures found in between."""

    def begun() -> tuple[Conversation, list[ImagePart], T | None]:
        chat = build()
        parts = chat.pictures
        return chat, parts, None if parts else finish(chat)

    chat, parts, made = await asyncio.to_thread(begun)
    if made is None:
        held = await pictures.find(parts, chat.expansions)
        made = await asyncio.to_thread(finish, chat)
        del held
    return made
