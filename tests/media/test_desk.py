"""The server's desk for pictures: files become digests in other processes, and faults stay there."""

from __future__ import annotations

import asyncio
import base64
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from pictures import broken_files, data_uri, encoded, painted, picture_site, png

from millrace.errors import BadPicture
from millrace.media.fetch import Fetcher
from millrace.media.limits import MediaLimits
from millrace.serving.media import MediaDesk


def at_desk(work: Callable[[MediaDesk], Awaitable[Any]], **limits: Any) -> Any:
    async def run() -> Any:
        allowed = MediaLimits(**limits)
        desk = MediaDesk(allowed, Fetcher(allowed, allows=lambda address: address == "127.0.0.1"))
        try:
            return await work(desk)
        finally:
            await desk.close()

    return asyncio.run(run())


def test_one_picture_is_one_digest_wherever_it_comes_from(tmp_path: Path) -> None:
    file = tmp_path / "a.png"
    file.write_bytes(png())
    webp = encoded(painted(), "WEBP", lossless=True)

    async def work(desk: MediaDesk) -> None:
        sources = [
            data_uri(png()),
            base64.b64encode(webp).decode(),
            f"file://{file}",
            site.url("/a.webp"),
            data_uri(png(seed=2)),
        ]
        found = await desk.gather(sources)
        assert len({f.digest for f in found[:4]}) == 1
        assert found[4].digest != found[0].digest
        assert [(f.width, f.height) for f in found] == [(48, 32)] * 5
        assert found[0].data == png() and found[3].data == webp
        assert await desk.gather([]) == []

    with picture_site() as site:
        site.pages["/a.webp"] = (200, {}, webp)
        at_desk(work, folders=(str(tmp_path),))


def test_broken_files_are_refused_and_the_next_picture_is_read() -> None:
    async def work(desk: MediaDesk) -> None:
        for data in broken_files().values():
            with pytest.raises(BadPicture):
                await desk.gather([data_uri(data)])
        assert await desk.gather([data_uri(png())])
        assert len(desk._pool.pids()) <= 2

    at_desk(work)


def test_a_decoder_that_dies_or_hangs_costs_its_own_picture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def work(desk: MediaDesk) -> None:
        await desk.gather([data_uri(png())])
        for pid in desk._pool.pids():
            os.kill(pid, signal.SIGKILL)
        await desk.gather([data_uri(png(seed=3))])
        for pid in desk._pool.pids():
            os.kill(pid, signal.SIGSTOP)
        desk.limits = MediaLimits(decode_seconds=0.2)
        with pytest.raises(BadPicture, match="decoded within 0.2 seconds"):
            await desk.gather([data_uri(png(seed=4))])
        assert await desk.gather([data_uri(png())])  # known, and so not decoded again

    at_desk(work)


def test_pictures_are_bounded_in_number_and_together() -> None:
    async def many(desk: MediaDesk) -> None:
        with pytest.raises(BadPicture, match="10000 pictures"):
            await desk.gather([data_uri(png())] * 10_000)
        assert desk._pool.pids() == []

    async def large(desk: MediaDesk) -> None:
        with pytest.raises(BadPicture, match="together"):
            await desk.gather([site.url(f"/a.png?{n}") for n in range(3)])

    at_desk(many)
    with picture_site() as site:
        for n in range(3):
            site.pages[f"/a.png?{n}"] = (200, {}, png())
        at_desk(large, most_fetched=2 * len(png()))
