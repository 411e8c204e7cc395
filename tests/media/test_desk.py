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

from millrace import worker_pool
from millrace.caller import current_caller
from millrace.errors import BadPicture
from millrace.media.claimed_size import claimed_pixels
from millrace.media.fetch import Fetcher
from millrace.media.limits import MediaLimits
from millrace.serving.media import MediaDesk, PictureFile


def at_desk(work: Callable[[MediaDesk], Awaitable[Any]], **limits: Any) -> Any:
    async def run() -> Any:
        allowed = MediaLimits(**limits)
        desk = MediaDesk(allowed, Fetcher(allowed, allows=lambda address: address == "127.0.0.1"))
        try:
            return await work(desk)
        finally:
            await desk.close()

    return asyncio.run(run())


async def gather(desk: MediaDesk, sources: list[str]) -> list[PictureFile]:
    return [(await desk.find(source))[0] for source in sources]


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
        found = await gather(desk, sources)
        assert len({f.digest for f in found[:4]}) == 1
        assert found[4].digest != found[0].digest
        assert [(f.width, f.height) for f in found] == [(48, 32)] * 5
        assert found[0].data == png() and found[3].data == webp
        assert (await desk.find(site.url("/a.webp")))[1] == len(webp)
        assert (await desk.find(data_uri(png())))[1] == 0

    with picture_site() as site:
        site.pages["/a.webp"] = (200, {}, webp)
        at_desk(work, folders=(str(tmp_path),))


def test_broken_files_are_refused_and_the_next_picture_is_read() -> None:
    async def work(desk: MediaDesk) -> None:
        for data in broken_files().values():
            with pytest.raises(BadPicture):
                await gather(desk, [data_uri(data)])
        assert await gather(desk, [data_uri(png())])
        assert len(desk._pool.pids()) <= 2

    at_desk(work)


def test_a_decoder_that_dies_or_hangs_costs_its_own_picture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def work(desk: MediaDesk) -> None:
        await gather(desk, [data_uri(png())])
        for pid in desk._pool.pids():
            os.kill(pid, signal.SIGKILL)
        more_than_a_pipe_holds = encoded(painted(300, 300, seed=5), "BMP")
        for seed, data in enumerate([png(seed=4), more_than_a_pipe_holds]):
            desk.limits = MediaLimits()
            await gather(desk, [data_uri(png(seed=10 + seed))])
            for pid in desk._pool.pids():
                os.kill(pid, signal.SIGSTOP)
            desk.limits = MediaLimits(decode_seconds=0.2)
            with pytest.raises(BadPicture, match="decoded within 0.2 seconds"):
                await gather(desk, [data_uri(data)])
        assert await gather(desk, [data_uri(png())])  # known, and so not decoded again

    at_desk(work)


def test_a_glance_is_a_picture_of_its_own() -> None:
    async def work(desk: MediaDesk) -> None:
        large = data_uri(png(1000, 400))
        whole, low = (await desk.find(large))[0], (await desk.find(large, low=True))[0]
        assert (whole.width, whole.height) == (1000, 400)
        assert max(low.width, low.height) == 512
        assert low.digest != whole.digest
        small = data_uri(png())
        assert (await desk.find(small, low=True))[0].digest == (await desk.find(small))[0].digest

    at_desk(work)


def test_a_stopped_decoder_does_not_cost_a_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(desk: MediaDesk) -> None:
        await gather(desk, [data_uri(png())])
        stopped = desk._pool.pids()
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        more_than_a_pipe_holds = encoded(painted(300, 300, seed=5), "BMP")
        assert await gather(desk, [data_uri(png(seed=4)), data_uri(more_than_a_pipe_holds)])
        assert not set(stopped) & set(desk._pool.pids())

    monkeypatch.setattr(worker_pool, "_LOOK_SECONDS", 0.05)
    at_desk(work)


def test_a_callers_slow_pictures_leave_a_process_for_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The stop stands for slowness here.
    monkeypatch.setattr(worker_pool, "_STOPPED_LOOKS", 10_000)

    async def work(desk: MediaDesk) -> None:
        def found(caller: str, seed: int) -> asyncio.Task[Any]:
            current_caller.set(caller)
            return asyncio.create_task(desk.find(data_uri(png(seed=seed))))

        while len(desk._pool.pids()) < 2:
            await asyncio.gather(*(found("a", len(desk._known) + i) for i in range(4)))
        stopped = desk._pool.pids()
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        crowd = [found("a", 1000 + i) for i in range(20)]
        await asyncio.wait_for(found("b", 5000), 60)
        assert not any(task.done() for task in crowd)
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
        assert len(await asyncio.gather(*crowd)) == 20

    at_desk(work)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP"])
def test_the_size_in_a_header_is_read_without_decoding(kind: str) -> None:
    assert claimed_pixels(encoded(painted(), kind)) == 48 * 32
    assert claimed_pixels(encoded(painted(), kind)[:8]) is None


def test_the_size_of_lossless_webp_is_read() -> None:
    assert claimed_pixels(encoded(painted(), "WEBP", lossless=True)) == 48 * 32
    assert claimed_pixels(b"BM nothing known") is None
