"""OpenAI's Conversations API: creates, reads, changes and deletes conversations and their items."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from fastapi import APIRouter

from serving.front.api.dependencies import Service, Tenant
from serving.front.api.responses.conversation_log import (
    Conversation,
    change_conversation,
    check_item_ids,
    close_conversation,
    item_of,
    open_conversation,
    read_conversation,
)
from serving.front.api.responses.item_pages import Included, ItemOrder, PageSize, PreviousItem, item_page
from serving.front.api.responses.items import AnyItems, Items, Json, canonical_items
from serving.front.api.shared_fields import Metadata
from serving.front.api.strict_json import StrictBody, StrictJsonRoute


class NewConversation(StrictBody):
    items: AnyItems | None = None
    metadata: Metadata | None = None


class ConversationChange(StrictBody):
    """`metadata` replaces the conversation's metadata. Null leaves none."""

    metadata: Metadata | None


class NewItems(StrictBody):
    items: Items


def routes() -> APIRouter:
    router = APIRouter(prefix="/v1/conversations", route_class=StrictJsonRoute, tags=["OpenAI"])
    router.add_api_route("", create_conversation, methods=["POST"])
    router.add_api_route("/{conversation_id}", get_conversation, methods=["GET"])
    router.add_api_route("/{conversation_id}", update_conversation, methods=["POST"])
    router.add_api_route("/{conversation_id}", delete_conversation, methods=["DELETE"])
    router.add_api_route("/{conversation_id}/items", list_items, methods=["GET"])
    router.add_api_route("/{conversation_id}/items", create_items, methods=["POST"])
    router.add_api_route("/{conversation_id}/items/{item_id:path}", get_item, methods=["GET"])
    router.add_api_route("/{conversation_id}/items/{item_id:path}", delete_item, methods=["DELETE"])
    return router


async def create_conversation(body: NewConversation, service: Service, tenant: Tenant) -> Json:
    check_item_ids((), body.items or (), "items")
    items = _canonical(body.items or [])
    return (await open_conversation(service, items, body.metadata or {}, tenant)).shown()


async def get_conversation(conversation_id: str, service: Service, tenant: Tenant) -> Json:
    return (await read_conversation(service, conversation_id, tenant)).shown()


async def update_conversation(
    conversation_id: str, body: ConversationChange, service: Service, tenant: Tenant
) -> Json:
    async def change(_conversation: Conversation) -> Json:
        return {"metadata": body.metadata or {}}

    return (await change_conversation(service, conversation_id, tenant, change)).shown()


async def delete_conversation(conversation_id: str, service: Service, tenant: Tenant) -> Json:
    """Deletes a conversation. Its responses can still be read by their ids."""
    await close_conversation(service, conversation_id, tenant)
    return {"id": conversation_id, "object": "conversation.deleted", "deleted": True}


async def list_items(
    conversation_id: str,
    service: Service,
    tenant: Tenant,
    limit: PageSize = 20,
    order: ItemOrder = "desc",
    after: PreviousItem = None,
    _include: Included = None,
) -> Json:
    conversation = await read_conversation(service, conversation_id, tenant)
    return item_page(conversation.items, limit, order, after)


async def create_items(
    conversation_id: str,
    body: NewItems,
    service: Service,
    tenant: Tenant,
    _include: Included = None,
) -> Json:
    """Adds items at the end of the conversation."""
    items = _canonical(body.items)

    async def change(conversation: Conversation) -> Json:
        check_item_ids(conversation.items, body.items, "items")
        return {"items": items}

    await change_conversation(service, conversation_id, tenant, change)
    return item_page(items, len(items), "asc", None)


async def get_item(
    conversation_id: str,
    item_id: str,
    service: Service,
    tenant: Tenant,
    _include: Included = None,
) -> Json:
    return item_of(await read_conversation(service, conversation_id, tenant), item_id)


async def delete_item(conversation_id: str, item_id: str, service: Service, tenant: Tenant) -> Json:
    """Deletes an item; the conversation's next response begins a history without it. Returns the conversation."""

    async def change(conversation: Conversation) -> Json:
        item_of(conversation, item_id)
        return {"deleted": item_id}

    return (await change_conversation(service, conversation_id, tenant, change)).shown()


def _canonical(items: list[Any]) -> list[Json]:
    return canonical_items(items, f"_{uuid4().hex}")
