"""A model's pictures: found once, bounded, held while a request lives, and sent when they are wanted."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from pictures import data_uri, picture_site, png

from millrace.errors import BadPicture, BadRequest
from millrace.media.fetch import Fetcher
from millrace.media.limits import MediaLimits
from millrace.media.processor import ProcessedPicture, ProcessTask
from millrace.protocol import Span
from millrace.serving.in_flight import InFlight
from millrace.serving.media import MediaDesk
from millrace.serving.picture_supply import PictureSupply
from millrace.serving.pictures import HeldPicture, ModelPictures, prepared
from millrace.text.conversation import Conversation, ConversationTurn, ImagePart, TextPart
from millrace.text.pictures import PictureWords

WORDS = PictureWords("<image>", 7, "<image>")


class Processed(ModelPictures):
    """With a processor that counts, in place of a model's own."""

    def __init__(self, desk: MediaDesk) -> None:
        super().__init__("eye", Path("nowhere"), WORDS, desk)
        self.runs = 0

    def _processed(self, task: ProcessTask, data: bytes) -> ProcessedPicture:
        self.runs += 1
        return ProcessedPicture("<image>" * 3, 3, (1, 1, 3), memoryview(task.digest.encode()))


async def gather(pictures: ModelPictures, chat: Conversation) -> list[HeldPicture]:
    return await pictures.find(chat.pictures, chat.expansions)


def with_pictures(work: Callable[[Processed], Awaitable[Any]], **limits: Any) -> None:
    async def run() -> None:
        allowed = MediaLimits(**limits)
        desk = MediaDesk(allowed, Fetcher(allowed, allows=lambda address: address == "127.0.0.1"))
        pictures = Processed(desk)
        try:
            await work(pictures)
        finally:
            pictures.close()
            await desk.close()

    asyncio.run(run())


def showing(*sources: str) -> Conversation:
    parts = [ImagePart(s, where=f"messages[0].content[{n}]") for n, s in enumerate(sources)]
    return Conversation([ConversationTurn("user", [*parts, TextPart("?")])])


def test_a_picture_is_processed_once_and_held_as_long_as_somebody_shows_it() -> None:
    async def work(pictures: Processed) -> None:
        chat = showing(data_uri(png()), data_uri(png(seed=2)), data_uri(png()))
        held = await gather(pictures, chat)
        digests = [part.digest for part in chat.pictures]
        assert digests[0] == digests[2] != digests[1]
        assert set(chat.expansions) == set(digests)
        assert pictures.runs == len(held) == 2
        again = await gather(pictures, showing(data_uri(png())))
        assert again[0] is held[0] and pictures.runs == 2
        first = await pictures.picture(held[0])
        assert bytes(first).decode() == digests[0]
        assert pictures.runs == 2
        assert await pictures.picture(held[0]) == first  # a second engine wants it as well
        assert pictures.runs == 3
        del held, again
        gc.collect()
        assert not pictures._held
        await gather(pictures, showing(data_uri(png())))
        assert pictures.runs == 3  # what becomes of it is still known

    with_pictures(work)


def test_pictures_are_bounded_in_number_and_together() -> None:
    async def work(pictures: Processed) -> None:
        with pytest.raises(BadPicture, match="5 pictures"):
            await gather(pictures, showing(*[data_uri(png())] * 5))
        assert await gather(pictures, showing(*[data_uri(png())] * 4))
        with pytest.raises(BadPicture, match=r"messages\[0\].content\[2\]: .*together"):
            await gather(pictures, showing(*[site.url(f"/a.png?{n}") for n in range(3)]))

    with picture_site() as site:
        for n in range(3):
            site.pages[f"/a.png?{n}"] = (200, {}, png())
        with_pictures(work, most=4, most_fetched=2 * len(png()))


def test_an_error_names_the_part_that_it_is_about() -> None:
    async def work(pictures: Processed) -> None:
        with pytest.raises(BadPicture) as refused:
            await gather(pictures, showing(data_uri(png()), "data:image/png;base64,AAAA"))
        assert refused.value.param == "messages[0].content[1]"
        assert refused.value.message.startswith("messages[0].content[1]: ")
        assert str(refused.value) == refused.value.message

    with_pictures(work)


def test_a_model_without_eyes_refuses_by_its_name() -> None:
    blind = ModelPictures("mole", Path("nowhere"), None, MediaDesk())
    with pytest.raises(BadRequest, match="the model 'mole' takes text only"):
        asyncio.run(gather(blind, showing(data_uri(png()))))
    assert not blind.taken
    blind.check([1, 2, 3], [])


def test_tokens_that_stand_for_pictures_stand_only_where_there_are_some() -> None:
    async def work(pictures: Processed) -> None:
        pictures.check([1, 7, 7, 2], [Span(1, 2, "d")])
        pictures.check([1, 2], [])
        for prompt, media in (([1, 7], []), ([7, 7, 7], [Span(0, 2, "d")])):
            with pytest.raises(BadRequest, match="stands for pictures"):
                pictures.check(prompt, media)

    with_pictures(work)


def test_text_alone_is_prepared_in_one_go() -> None:
    async def work(pictures: Processed) -> None:
        text = Conversation([ConversationTurn("user", "hi")])
        assert await prepared(pictures, lambda: text, lambda chat: chat is text)
        assert await prepared(
            pictures, lambda: showing(data_uri(png())), lambda chat: list(chat.expansions)
        )

    with_pictures(work)


class _Request(InFlight):
    def __init__(self, picture: Any) -> None:
        self.picture = picture


def test_what_an_engine_wants_is_sent_to_that_engine_and_to_no_other() -> None:
    async def work() -> None:
        sent: list[Any] = []
        failed: list[Exception] = []
        engine = object()
        gate = asyncio.Event()

        async def picture(digest: str) -> memoryview:
            await gate.wait()
            if digest == "bad":
                raise BadPicture("no")
            return memoryview(digest.encode())

        supply = PictureSupply(sent.append, lambda: engine, lambda _, error: failed.append(error))
        supply.wanted(_Request(picture), ["a", "b"])
        gate.set()
        await asyncio.gather(*supply._tasks)
        assert [bytes(p) for p in sent] == [b"a", b"b"]
        supply.wanted(_Request(picture), ["bad", "c"])
        supply.wanted(_Request(None), ["d"])
        supply.wanted(None, ["e"])
        await asyncio.gather(*supply._tasks)
        assert len(failed) == 2 and len(sent) == 2
        gate.clear()
        supply.wanted(_Request(picture), ["f"])
        await asyncio.sleep(0)
        engine = object()
        gate.set()
        await asyncio.gather(*supply._tasks)
        assert len(sent) == 2 and len(failed) == 2

    asyncio.run(work())
