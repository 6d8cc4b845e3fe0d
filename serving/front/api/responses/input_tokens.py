"""OpenAI's /v1/responses/input_tokens: how many tokens a response would have as its input."""

from __future__ import annotations

from functools import partial
from typing import Any

from serving.front.api.fields import Service, Tenant, adapter_of
from serving.front.api.responses.continuations import NAMES_OF_INPUT, Continued
from serving.front.api.responses.conversation_log import said_before
from serving.front.api.responses.items import Json, canonical_items
from serving.front.api.responses.schema import ResponsesBody, check_state
from serving.front.api.session_headers import ModeHeader, SessionHeader, TurnHeader, check_no_session
from serving.front.api.turn_streams import TurnPlan, beside_streams, in_the_words_of
from serving.wire.turns import ChatPrompt, ModelInfo


async def count_input_tokens(
    body: ResponsesBody,
    service: Service,
    tenant: Tenant,
    x_session_id: SessionHeader = None,
    x_session_mode: ModeHeader = None,
    x_session_turn: TurnHeader = None,
) -> dict[str, Any]:
    """The tokens of the prompt as the chat template renders it, up to where the answer begins, with all that the body
    goes on from."""
    check_no_session(x_session_id, x_session_mode, x_session_turn)
    adapter_of(body.model, service.model)
    check_state(body)
    before = await said_before(service, body, tenant)
    make_prompt = partial(_prompt, body, before, service.model)
    said, prompt = await beside_streams(make_prompt, len(before) + len(body.input))
    name_of_message = partial(Continued(None, tuple(before)).name_of_message, body, said)
    with in_the_words_of(TurnPlan((), NAMES_OF_INPUT, name_of_message)):
        tokenized = await service.tokenize(prompt, add_special_tokens=True, with_token_strs=False)
    return {"object": "response.input_tokens", "input_tokens": len(tokenized.token_ids)}


def _prompt(body: ResponsesBody, before: list[Json], model: ModelInfo) -> tuple[list[Json], ChatPrompt]:
    """All that is said in the prompt, and the prompt."""
    said = [*before, *canonical_items(body.input, "")]
    return said, body.chat_prompt(said, body.offered_tools(model).use)
