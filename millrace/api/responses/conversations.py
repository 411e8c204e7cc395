"""Conversations: named lists of items that responses read and write."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
from fastapi import APIRouter, Depends
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from millrace.api.answer import as_json
from millrace.api.body import convert, read_object
from millrace.api.context import caller_of, context_of
from millrace.api.openapi.describe import READS, describe
from millrace.api.responses.answers import ConversationObject, Deleted, ItemList, Paging
from millrace.api.responses.ids import fresh
from millrace.api.responses.items import Item, read_items
from millrace.api.responses.owners import owned
from millrace.api.responses.paging import listed, page
from millrace.api.responses.reader import StoredConversation
from millrace.api.responses.sections import Section
from millrace.api.responses.store import Store, conversation_object
from millrace.errors import BadRequest, NotFound
from millrace.serving.ranges import Labels

MOST_ITEMS = 20
"""Items that one request may add, as in OpenAI's API."""

router = APIRouter(dependencies=[Depends(owned)])


class NewConversation(msgspec.Struct):
    items: list[Any] | None = None
    metadata: Labels | None = None


class NewItems(msgspec.Struct):
    items: list[Any]


class NewLabels(msgspec.Struct):
    metadata: Labels


@router.post("/v1/conversations")
@describe(
    "conversations",
    "Begin a conversation",
    body=NewConversation,
    answer=ConversationObject,
    statuses=(*READS, 503, 507),
)
async def create(http: HttpRequest) -> Response:
    wire = convert(await _body(http), NewConversation)
    created = conversation_object(
        fresh("conv_", caller_of(http)), int(time.time()), wire.metadata or {}
    )
    await _store(http).add_conversation(created, await _items(wire.items or []))
    return as_json(created)


@router.get("/v1/conversations/{id}")
@describe("conversations", "One conversation", answer=ConversationObject, statuses=(404,))
async def get(http: HttpRequest, id: str) -> Response:
    return as_json(_object(id, await _store(http).conversation(id)))


@router.post("/v1/conversations/{id}")
@describe(
    "conversations",
    "Label a conversation",
    body=NewLabels,
    answer=ConversationObject,
    statuses=(*READS, 404, 503, 507),
)
async def update(http: HttpRequest, id: str) -> Response:
    labels = convert(await _body(http), NewLabels)
    found = await _store(http).conversation(id)
    _demand(id, await _store(http).label_conversation(id, labels.metadata))
    return as_json(conversation_object(id, found.created, labels.metadata))


@router.delete("/v1/conversations/{id}")
@describe("conversations", "Delete a conversation", answer=Deleted, statuses=(404, 503, 507))
async def delete(http: HttpRequest, id: str) -> Response:
    _demand(id, await _store(http).delete_conversation(id))
    return as_json({"id": id, "object": "conversation.deleted", "deleted": True})


@router.get("/v1/conversations/{id}/items")
@describe(
    "conversations",
    "The items of a conversation",
    answer=ItemList,
    query=Paging,
    statuses=(400, 404),
)
async def items(http: HttpRequest, id: str) -> Response:
    await _store(http).conversation(id)
    return as_json(await page(http, _store(http), [Section(id)]))


@router.post("/v1/conversations/{id}/items")
@describe(
    "conversations",
    "Add items to a conversation",
    body=NewItems,
    answer=ItemList,
    statuses=(*READS, 404, 503, 507),
)
async def add(http: HttpRequest, id: str) -> Response:
    wire = convert(await _body(http), NewItems)
    await _store(http).conversation(id)
    added = await _items(wire.items)
    _demand(id, await _store(http).extend_conversation(id, added))
    return as_json(listed(added))


@router.get("/v1/conversations/{id}/items/{item}")
@describe("conversations", "One item", statuses=(404,))
async def item(http: HttpRequest, id: str, item: str) -> Response:
    await _store(http).conversation(id)
    return as_json(await _store(http).conversation_item(id, item))


@router.delete("/v1/conversations/{id}/items/{item}")
@describe("conversations", "Remove an item", answer=ConversationObject, statuses=(404, 503, 507))
async def remove(http: HttpRequest, id: str, item: str) -> Response:
    found = await _store(http).conversation(id)
    await _store(http).shorten_conversation(id, item)
    return as_json(_object(id, found))


def _store(http: HttpRequest) -> Store:
    return context_of(http).store


def _demand(id: str, found: bool) -> None:
    """Raise if there was no such conversation to be changed; it may have been there before."""
    if not found:
        raise NotFound(f"There is no conversation '{id}' here.", param="conversation")


async def _body(http: HttpRequest) -> dict[str, Any]:
    return await read_object(http, context_of(http).config.max_body)


def _object(id: str, found: StoredConversation) -> dict[str, Any]:
    return conversation_object(id, found.created, found.metadata)


async def _items(given: list[Any]) -> list[Item]:
    if len(given) > MOST_ITEMS:
        raise BadRequest(
            f"items has {len(given)} entries; a request may add {MOST_ITEMS} at most.",
            param="items",
        )
    read = await asyncio.to_thread(read_items, given)
    if any(i["type"] == "item_reference" for i in read):
        raise BadRequest("A conversation takes whole items, not their names.", param="items")
    return read
