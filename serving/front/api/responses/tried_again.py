"""A call that its client counts as a retry, in a conversation that has the answer to the first try already.

The client may have lost the answer, but the conversation has not. A second response would say everything twice there.
Without a conversation nothing has to be found: a response that is made twice is two responses, and both can be
continued.
"""

from __future__ import annotations

import time

from serving.front.api.responses.continuations import NOT_COMPARED
from serving.front.api.responses.conversation_log import NAMES_OF_RESPONSES, read_conversation
from serving.front.api.responses.items import Json, canonical_items
from serving.front.api.responses.schema import ResponsesBody
from serving.front.api.responses.store import kept_response
from serving.front.api.service import TurnService

TRIED_AGAIN_WITHIN_S = 600.0
"""A response that began longer ago was not for a call that is now tried again: clients give up before."""


async def first_try(service: TurnService, body: ResponsesBody, tenant: str) -> str | None:
    """The id of the response that an earlier try of this call has made: the last one in the body's conversation, if it
    was asked for in the same way a short while ago. None if there is none. Raises ServiceError."""
    if body.conversation_id is None:
        return None
    with NAMES_OF_RESPONSES.in_errors():
        conversation = await read_conversation(service, body.conversation_id, tenant)
    last_id = conversation.last_response_id
    if last_id is None or conversation.entries[-1].response_id != last_id:
        return None
    stored = await kept_response(service, last_id, tenant)
    if stored is None or time.time() - stored.head.created_at > TRIED_AGAIN_WITHIN_S:
        return None
    given = canonical_items(body.input, last_id)
    is_same = stored.body.asked() == body.asked() and _compared(stored.input) == _compared(given)
    return last_id if is_same else None


def _compared(items: list[Json]) -> list[Json]:
    return [item | NOT_COMPARED for item in items]
