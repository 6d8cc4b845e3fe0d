"""Anthropic's Messages API: /v1/messages, whole or streamed, and the number of tokens of a prompt."""

from __future__ import annotations

from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from serving.front.api.affinity import AffinityKeys
from serving.front.api.answers.held import field_names
from serving.front.api.answers.reader import AnswerReader, answer_fields, reads_thoughts, scope_of
from serving.front.api.answers.tools import ToolUse
from serving.front.api.dependencies import Service, Tenant
from serving.front.api.documented_replies import STREAMED
from serving.front.api.field_names import FieldNames
from serving.front.api.fields import most_tokens, new_id
from serving.front.api.messages.history import message_of
from serving.front.api.messages.replies import MessageReply, blocks_of, no_edits, stop_of, usage_of
from serving.front.api.messages.schema import CountTokensBody, MessagesBody, PromptBody
from serving.front.api.messages.stream import MessageEncoder
from serving.front.api.messages.tools import tools_in_use
from serving.front.api.named_model import adapter_of, model_for
from serving.front.api.reply_json import json_reply, reply_json
from serving.front.api.session_headers import IN_NO_SESSION, InSession
from serving.front.api.sse import TurnEventStream
from serving.front.api.strict_json import StrictJsonRoute
from serving.front.api.turn_streams import (
    TurnPlan,
    beside_streams,
    collect,
    until_disconnect,
)
from serving.wire.turns import ModelInfo, TurnCall, TurnEvent, TurnFinish

REQUEST_ID = "request-id"


def routes() -> APIRouter:
    router = APIRouter(route_class=StrictJsonRoute, tags=["Anthropic"])
    router.add_api_route("/v1/messages", create_message, methods=["POST"], responses=STREAMED)
    router.add_api_route(
        "/v1/messages/count_tokens", count_tokens, methods=["POST"], dependencies=IN_NO_SESSION
    )
    return router


async def create_message(
    body: MessagesBody,
    request: Request,
    headers: InSession,
    service: Service,
    tenant: Tenant,
) -> Response:
    model = await model_for(service, body.model)
    adapter = adapter_of(body.model, model)
    body.check()
    session = headers.turn(1, "messages")
    tools = tools_in_use(body.tools, body.tool_choice, model)
    reply_id = new_id("msg_")
    fields = {
        "session": session,
        "tenant": tenant,
        "affinity_key": AffinityKeys.of(request).key(user=body.user_id),
        "adapter": adapter,
    }
    make_plan = partial(_plan, body, tools, model, reply_id, fields)
    plan = await beside_streams(make_plan, len(body.messages))
    (call,) = plan.calls
    reader = AnswerReader(scope_of(call), tools, reads_thoughts(model, call.constraint))
    model_id = adapter or model.model_id
    response: Response
    if body.stream:
        encoder = MessageEncoder(reader, reply_id, model_id, edits_asked=body.context_management is not None)
        response = TurnEventStream(service, plan, encoder)
    else:
        results = await until_disconnect(request.receive, collect(service, plan))
        response = json_reply(_reply(body, reader, reply_id, model_id, results[0]), results)
    response.headers[REQUEST_ID] = reply_id
    return response


async def count_tokens(
    body: CountTokensBody,
    service: Service,
) -> dict[str, int]:
    """The tokens of the prompt as the chat template renders it, up to where the answer begins."""
    model = await model_for(service, body.model)
    adapter_of(body.model, model)
    tools = tools_in_use(body.tools, body.tool_choice, model)
    prompt = await beside_streams(partial(body.prompt, tools), len(body.messages))
    with FieldNames(of_message=partial(_name_of_message, body)).in_errors():
        tokenized = await service.tokenize(prompt, with_token_strs=False)
    return {"input_tokens": len(tokenized.token_ids)}


def _plan(
    body: MessagesBody,
    tools: ToolUse,
    model: ModelInfo,
    reply_id: str,
    turn_fields: dict[str, Any],
) -> TurnPlan:
    held = body.held_answer()
    call = TurnCall(
        request_id=reply_id,
        prompt=body.prompt(tools),
        sampling=body.sampling(model),
        max_new_tokens=most_tokens(model, body.max_tokens),
        stop=tuple(body.stop_sequences or ()),
        **answer_fields(model, held, tools),
        **turn_fields,
    )
    return TurnPlan([call], field_names("messages", held, of_message=partial(_name_of_message, body)))


def _name_of_message(body: PromptBody, index: int) -> str:
    """The part of the request that the prompt's message of this index comes from."""
    at = message_of(index, body.system, body.messages)
    return "system" if at is None else f"messages[{at}]"


def _reply(
    body: MessagesBody, reader: AnswerReader, reply_id: str, model_id: str, result: TurnEvent
) -> bytes:
    content = blocks_of(reader.read(result))
    reason, sequence = stop_of(reader.finish(result) or TurnFinish("abort"))
    return reply_json(
        MessageReply(
            id=reply_id,
            model=model_id,
            content=content,
            stop_reason=reason,
            stop_sequence=sequence,
            usage=usage_of(result),
            context_management=no_edits(body.context_management is not None),
        )
    )
