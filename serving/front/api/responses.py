"""OpenAI's Responses API: made, whole or streamed; had again; gone on from; deleted."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, Response

from serving.front.api.errors import refusal
from serving.front.api.fields import RetriesHeader, Service, Tenant, check_model_name, nth_seed
from serving.front.api.openai_answers import AnswerReader
from serving.front.api.openai_requests import field_names
from serving.front.api.reply_json import encoded, json_reply
from serving.front.api.responses_history import template_messages
from serving.front.api.responses_items import Json, canonical_items
from serving.front.api.responses_replies import ResponseHead, ResponseReader
from serving.front.api.responses_schema import ResponsesBody, check_stream_options
from serving.front.api.responses_store import (
    calls_named_by,
    continued,
    find_response,
    forget_response,
    new_response_id,
)
from serving.front.api.responses_stream import ResponseEncoder
from serving.front.api.responses_tools import OfferedTools, offered_tools
from serving.front.api.sse import TurnEventStream
from serving.front.api.strict_json import StrictJsonRoute
from serving.front.api.thoughts import reads_thoughts, telling_tokens
from serving.front.api.turn_streams import TurnPlan, collect, until_disconnect
from serving.wire.turns import ChatPrompt, ModelInfo, SessionTurn, TurnCall

FEW_ITEMS = 256
"""More are brought into shape on a thread: streams go on meanwhile."""
PageSize = Annotated[int, Query(ge=1, le=100)]


def routes() -> APIRouter:
    router = APIRouter(route_class=StrictJsonRoute, tags=["OpenAI"])
    router.add_api_route("/v1/responses", create_response, methods=["POST"])
    router.add_api_route("/v1/responses/{response_id}", get_response, methods=["GET"])
    router.add_api_route("/v1/responses/{response_id}", delete_response, methods=["DELETE"])
    router.add_api_route("/v1/responses/{response_id}/cancel", cancel_response, methods=["POST"])
    router.add_api_route("/v1/responses/{response_id}/input_items", list_input_items, methods=["GET"])
    router.add_api_route("/v1/embeddings", refuse_embeddings, methods=["POST"], include_in_schema=False)
    return router


async def create_response(
    body: ResponsesBody,
    request: Request,
    service: Service,
    tenant: Tenant,
    x_stainless_retry_count: RetriesHeader = None,  # noqa: ARG001
) -> Response:
    model = service.model
    check_model_name(body.model, model)
    check_stream_options(body)
    tools = offered_tools(body.tools, body.tool_choice, body.parallel_tool_calls, model)
    before = await continued(service, body, tenant)
    response_id = new_response_id(before.session_id)
    head = ResponseHead(response_id, model.model_id, body.repeated())
    items = canonical_items(body.input, response_id)
    session = await before.turn(service, head, items, body, tenant)
    make = (body, tools, model, response_id, [*before.items, *items], session, tenant)
    plan = _plan(*make) if len(items) <= FEW_ITEMS else await asyncio.to_thread(_plan, *make)
    reader = ResponseReader(
        head,
        AnswerReader(calls_named_by(response_id), tools.use, reads_thoughts(model, plan.calls[0].constraint)),
        tools,
        encrypts_reasoning=body.encrypts_reasoning,
    )
    if body.stream:
        return TurnEventStream(service, plan, ResponseEncoder(head, reader))
    (result,) = results = await until_disconnect(request.receive, collect(service, plan))
    reader.read(result)
    return json_reply(encoded(reader.response(result)), results)


def _plan(
    body: ResponsesBody,
    tools: OfferedTools,
    model: ModelInfo,
    response_id: str,
    items: list[Json],
    session: SessionTurn | None,
    tenant: str,
) -> TurnPlan:
    held, use = body.held(), tools.use
    constraint = None if held is None else held.constraint
    if use is not None:
        constraint = use.constraint(held)
    call = TurnCall(
        request_id=response_id,
        prompt=ChatPrompt(
            template_messages(body.instructions, items),
            body.template_kwargs,
            () if use is None else use.for_template(),
        ),
        sampling=body.sampling(model),
        seed=nth_seed(body.seed, 0),
        max_new_tokens=body.most_tokens(model),
        shown_tokens=telling_tokens(use, reads_thoughts(model, constraint)),
        constraint=constraint,
        strict_calls=None if use is None else use.strict_calls(model, constraint),
        session=session,
        tenant=tenant,
        affinity_key=body.prompt_cache_key or "",
    )
    names = field_names("input", held) | {
        "max_new_tokens": "max_output_tokens",
        "messages": "input",
        "session_id": "previous_response_id",
    }
    return TurnPlan([call], names)


async def get_response(
    response_id: str,
    service: Service,
    tenant: Tenant,
    stream: bool | None = None,
    include: Annotated[list[str] | None, Query(max_length=32)] = None,  # noqa: ARG001
) -> Response:
    if stream:
        raise refusal("stream: a response is had again whole.", "stream", code="unsupported_field")
    stored = await find_response(service, response_id, tenant)
    return JSONResponse(stored.response(service.model))


async def delete_response(response_id: str, service: Service, tenant: Tenant) -> dict[str, Any]:
    await forget_response(service, response_id, tenant)
    return {"id": response_id, "object": "response", "deleted": True}


async def cancel_response(response_id: str, service: Service, tenant: Tenant) -> Response:
    await find_response(service, response_id, tenant)
    raise refusal("Only a response that is made in the background can be cancelled.", "response_id")


async def list_input_items(
    response_id: str,
    service: Service,
    tenant: Tenant,
    limit: PageSize = 20,
    order: Literal["asc", "desc"] = "desc",
    after: Annotated[str | None, Query(max_length=512)] = None,
    include: Annotated[list[str] | None, Query(max_length=32)] = None,  # noqa: ARG001
) -> dict[str, Any]:
    """Those that its request sent."""
    items = (await find_response(service, response_id, tenant)).input
    if order == "desc":
        items = items[::-1]
    if after is not None:
        names = [item["id"] for item in items]
        if after not in names:
            raise refusal(f"after: no item {after[:120]!r}.", "after")
        items = items[names.index(after) + 1 :]
    page = items[:limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(items) > limit,
    }


async def refuse_embeddings() -> None:
    raise refusal(
        "Embeddings are not served: Kedge serves models that write.", None, status=404, code="not_supported"
    )
