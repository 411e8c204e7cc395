"""Searches of the Hugging Face hub for callers: few at a time, each with a deadline.

The hub client's own search has no time limit and cannot be given up, so its address, its token and its
offline mode are taken from it and the request is made here.
"""

from __future__ import annotations

import asyncio

import httpx
import msgspec

from millrace.errors import HubUnreachable
from millrace.fair_semaphore import FairSemaphore
from millrace.models.hub_search import ENOUGH, HubModel, Listed, described, listed, queries
from millrace.version import __version__

_AT_ONCE = 4
_SECONDS = 4.0
"""For a search; a person waits for it."""


class HubSearch:
    def __init__(self, seconds: float = _SECONDS) -> None:
        self._seconds = seconds
        self._places = FairSemaphore(
            _AT_ONCE,
            per_caller=_AT_ONCE // 2,
            work="to have the hub searched",
            waiting_per_caller=8,
            waiting=32,
        )

    async def find(self, words: str, most: int, memory: int | None) -> list[HubModel]:
        """Models whose names have these words, the most often fetched first."""
        async with self._places.place():
            try:
                async with asyncio.timeout(self._seconds):
                    return await self._found(words, most, memory)
            except TimeoutError:
                raise HubUnreachable(
                    f"Hugging Face did not answer within {self._seconds:g} seconds."
                ) from None
            except (httpx.HTTPError, httpx.InvalidURL, msgspec.MsgspecError) as error:
                cause = (str(error).strip().splitlines() or [type(error).__name__])[0]
                raise HubUnreachable(f"Hugging Face cannot be searched: {cause[:200]}") from error

    async def _found(self, words: str, most: int, memory: int | None) -> list[HubModel]:
        address, client = await asyncio.to_thread(_client)
        async with client:
            found: list[Listed] = []
            for query in queries(words, most):
                response = await client.get(address, params=query)
                response.raise_for_status()
                found += await asyncio.to_thread(listed, response.content)
                if len(found) >= ENOUGH:
                    break
        return await asyncio.to_thread(described, found, most, memory)


def _client() -> tuple[str, httpx.AsyncClient]:
    """The address of the hub's list of models, and a client with the token of this machine."""
    from huggingface_hub import constants, get_token

    if constants.HF_HUB_OFFLINE:
        raise HubUnreachable("Hugging Face is not asked: HF_HUB_OFFLINE is set.")
    headers = {"user-agent": f"millrace/{__version__}"}
    if token := get_token():
        headers["authorization"] = f"Bearer {token}"
    client = httpx.AsyncClient(headers=headers, follow_redirects=True, timeout=None)
    return f"{constants.ENDPOINT}/api/models", client
