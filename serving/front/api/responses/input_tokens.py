"""OpenAI's /v1/responses/input_tokens: how many tokens a response would have as its input."""

from __future__ import annotations

from functools import partial
from typing import Any

from serving.front.api.fields import Service, Tenant, adapter_of
from serving.front.api.responses.conversation_log import said_before
from serving.front.api.responses.history import template_messages
from serving.front.api.responses.items import Json, canonical_items
from serving.front.api.responses.schema import ResponsesBody, check_state
from serving.front.api.responses.tools import offered_tools
from serving.front.api.session_headers import ModeHeader, SessionHeader, TurnHeader, check_no_session
from serving.front.api.turn_streams import beside_streams
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
    prompt = await beside_streams(make_prompt, len(before) + len(body.input))
    tokenized = await service.tokenize(prompt, add_special_tokens=True, with_token_strs=False)
    return {"object": "response.input_tokens", "input_tokens": len(tokenized.token_ids)}


def _prompt(body: ResponsesBody, before: list[Json], model: ModelInfo) -> ChatPrompt:
    use = offered_tools(body.tools, body.tool_choice, body.parallel_tool_calls, model).use
    return ChatPrompt(
        template_messages(body.instructions, [*before, *canonical_items(body.input, "")]),
        body.template_kwargs,
        () if use is None else use.for_template(),
    )
