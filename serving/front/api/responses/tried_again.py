"""A call that its client counts as a retry, in a conversation that has the answer to the first try already.

The client may have lost the answer, but the conversation has not. A second response would say everything twice there.
Without a conversation nothing has to be found: a response that is made twice is two responses, and both can be
continued.
"""

from __future__ import annotations

import time
from typing import Any

from serving.front.api.responses.conversation_log import read_conversation
from serving.front.api.responses.items import Json, canonical_items
from serving.front.api.responses.schema import ResponsesBody
from serving.front.api.responses.store import find_response
from serving.wire.turns import TurnService

TRIED_AGAIN_WITHIN_S = 600.0
"""A response that began longer ago was not for a call that is now tried again: clients give up before."""

_NEW_EACH_TIME: Json = {"id": None, "status": None}


async def first_try(service: TurnService, body: ResponsesBody, tenant: str) -> str | None:
    """The id of the response that an earlier try of this call has made: the last one in the body's conversation, if it
    was asked for in the same way a short while ago. None if there is none. Raises ServiceError."""
    if body.conversation_id is None:
        return None
    conversation = await read_conversation(service, body.conversation_id, tenant, "conversation")
    last_id = conversation.last_response_id
    if last_id is None or conversation.entries[-1].response_id != last_id:
        return None
    stored = await find_response(service, last_id, tenant)
    if time.time() - stored.head.created_at > TRIED_AGAIN_WITHIN_S:
        return None
    is_same = _asked(stored.body, stored.input) == _asked(body, canonical_items(body.input, last_id))
    return last_id if is_same else None


def _asked(body: ResponsesBody, items: list[Json]) -> Any:
    """What the client asked for, without the ids that each try gives to the items."""
    fields = body.model_dump(
        mode="json", by_alias=True, exclude={"input"}, exclude_unset=True, serialize_as_any=True
    )
    return fields, [item | _NEW_EACH_TIME for item in items]
