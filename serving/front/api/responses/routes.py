"""OpenAI's Responses API: creates responses, whole or streamed; reads them again; cancels and deletes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, Response

from serving.front.api.affinity import AffinityKeys
from serving.front.api.answers.held import field_names
from serving.front.api.answers.reader import AnswerReader, answer_fields, reads_thoughts, scope_of
from serving.front.api.dependencies import Service, Tenant
from serving.front.api.documented_replies import STREAMED
from serving.front.api.errors import refusal
from serving.front.api.fields import nth_seed
from serving.front.api.named_model import adapter_of, model_for
from serving.front.api.priorities import engine_priority
from serving.front.api.reply_json import json_reply, reply_json
from serving.front.api.responses.background import Background, FollowedTurn, cancel, look_up
from serving.front.api.responses.continuations import Continued, begun
from serving.front.api.responses.conversation_log import begin_response, keep_items
from serving.front.api.responses.input_tokens import count_input_tokens
from serving.front.api.responses.item_pages import Included, ItemOrder, PageSize, PreviousItem, item_page
from serving.front.api.responses.items import Json, canonical_items
from serving.front.api.responses.replies import ResponseHead, ResponseReader
from serving.front.api.responses.schema import (
    ResponsesBody,
    check_logprobs,
    check_state,
    in_named_session,
)
from serving.front.api.responses.store import (
    forget_response,
    input_items,
    new_response_id,
)
from serving.front.api.responses.stream import CharacterNumbers, EventNumbers, ResponseEncoder
from serving.front.api.responses.tools import OfferedTools
from serving.front.api.responses.tried_again import first_try
from serving.front.api.responses.turns import ResponseTurns
from serving.front.api.rules import rules_of
from serving.front.api.service import TurnService
from serving.front.api.session_headers import IN_NO_SESSION, InSession
from serving.front.api.shared_fields import check_stream_options
from serving.front.api.sse import TurnEventStream
from serving.front.api.strict_json import StrictJsonRoute
from serving.front.api.turn_streams import TurnPlan, beside_streams, collect, until_disconnect
from serving.wire.turns import ModelInfo, OutputConstraint, SessionTurn, TurnCall

MOST_NUMBER = 2**53


def routes() -> APIRouter:
    router = APIRouter(route_class=StrictJsonRoute, tags=["OpenAI"])
    router.add_api_route("/v1/responses", create_response, methods=["POST"], responses=STREAMED)
    router.add_api_route(
        "/v1/responses/input_tokens", count_input_tokens, methods=["POST"], dependencies=IN_NO_SESSION
    )
    router.add_api_route(
        "/v1/responses/compact", refuse_compaction, methods=["POST"], include_in_schema=False
    )
    router.add_api_route("/v1/responses/{response_id}", get_response, methods=["GET"], responses=STREAMED)
    router.add_api_route("/v1/responses/{response_id}", delete_response, methods=["DELETE"])
    router.add_api_route("/v1/responses/{response_id}/cancel", cancel_response, methods=["POST"])
    router.add_api_route("/v1/responses/{response_id}/input_items", list_input_items, methods=["GET"])
    router.add_api_route("/v1/embeddings", refuse_embeddings, methods=["POST"], include_in_schema=False)
    return router


async def create_response(
    body: ResponsesBody,
    request: Request,
    headers: InSession,
    service: Service,
    background: Background,
    tenant: Tenant,
) -> Response:
    check_stream_options(body.stream_options, body)
    session = headers.turn(1, "input")
    if session is not None:
        body = in_named_session(body)
    elif headers.retries and (made := await first_try(service, body, tenant)) is not None:
        return await get_response(made, service, background, tenant, stream=body.stream)
    rules = rules_of(request.app)
    priority = engine_priority(rules.request_priority, lower_first=body.priority)
    before = None if session is None else begun(body)
    asked = await asked_response(body, service, tenant, priority, AffinityKeys.of(request), before, session)
    if body.is_background:
        turn = await asked.turns.start(background, asked.plan)
        if body.stream:
            encoder = ResponseEncoder(asked.head, asked.reader, CharacterNumbers())
            return TurnEventStream(turn, asked.plan, encoder)
        return JSONResponse(asked.head.response("queued"))
    if body.stream:
        encoder = ResponseEncoder(asked.head, asked.reader, EventNumbers())
        return TurnEventStream(asked.turns, asked.plan, encoder)
    (result,) = results = await until_disconnect(request.receive, collect(asked.turns, asked.plan))
    await beside_streams(partial(asked.reader.read, result), len(result.logprobs))
    return json_reply(reply_json(asked.reader.response(result)), results)


@dataclass(frozen=True, slots=True)
class AskedResponse:
    """A response that is about to be made: its turn, what runs the turn, and what reads it. `items` is everything that
    was said before the answer."""

    head: ResponseHead
    items: list[Json]
    plan: TurnPlan
    turns: ResponseTurns
    reader: ResponseReader


async def asked_response(
    body: ResponsesBody,
    service: TurnService,
    tenant: str,
    priority: int,
    affinity: AffinityKeys,
    before: Continued | None = None,
    named: SessionTurn | None = None,
) -> AskedResponse:
    """Prepares the response that the body asks for. `affinity` belongs to its connection. `before`: what it goes on
    from, if the caller knows. `named`: its turn in a session that the client names; such a response is not stored.
    Raises ServiceError."""
    model = await model_for(service, body.model)
    adapter = adapter_of(body.model, model)
    check_state(body)
    tools = body.offered_tools(model)
    held_to = answer_fields(model, body.held(), tools.use)
    check_logprobs(body, is_parted=_is_parted(tools, model, held_to["constraint"]))
    # This writes the response into its conversation, so what the body alone is refused for is refused by now.
    if before is None:
        before, response_id = await begin_response(service, body, tenant)
    else:
        response_id = new_response_id(before.session_id)
    head = ResponseHead(
        response_id, adapter or model.model_id, body.repeated(model), model.tool_calls, model.reasoning
    )
    given = body.input[before.num_repeated :]
    items = await beside_streams(partial(canonical_items, given, response_id), len(given))
    turn_after = partial(Continued.turn, head=head, items=items, body=body)
    said = [*before.items, *items]
    turn = named or await beside_streams(partial(turn_after, before), len(said))
    fields = {
        "session": turn,
        "tenant": tenant,
        "affinity_key": affinity.key(body.prompt_cache_key, body.user),
        "may_be_kept": turn is not None,
        "priority": priority,
        "adapter": adapter,
        **held_to,
    }
    name_of_message = partial(before.name_of_message, body, said)
    make_plan = partial(_plan, body, tools, model, response_id, said, fields, name_of_message)
    plan = await beside_streams(make_plan, len(items))
    (call,) = plan.calls
    # What a stored response's calls are named by does not depend on the session that its turn is read from.
    scope = response_id if named is None else scope_of(call)
    reader = ResponseReader(
        head,
        AnswerReader(scope, tools.use, reads_thoughts(model, call.constraint)),
        tools,
        encrypts_reasoning=body.encrypts_reasoning,
        top_logprobs=body.top_logprobs or 0,
    )
    return AskedResponse(head, said, plan, ResponseTurns(service, before, turn_after), reader)


def _is_parted(tools: OfferedTools, model: ModelInfo, constraint: OutputConstraint | None) -> bool:
    """Whether calls or thoughts are looked for in the answer."""
    return tools.use.read_format is not None or reads_thoughts(model, constraint) is not None


def _plan(
    body: ResponsesBody,
    tools: OfferedTools,
    model: ModelInfo,
    response_id: str,
    items: list[Json],
    turn_fields: dict[str, Any],
    name_of_message: Callable[[int], str],
) -> TurnPlan:
    call = TurnCall(
        request_id=response_id,
        prompt=body.chat_prompt(items, tools.use),
        sampling=body.sampling(model),
        seed=nth_seed(body.seed, 0),
        max_new_tokens=body.most_tokens(model),
        logprobs=body.logprobs(),
        **turn_fields,
    )
    names = field_names(
        "input",
        body.held(),
        "max_output_tokens",
        session_field="previous_response_id" if body.is_stored else "x-session-id",
        of_message=name_of_message,
    )
    return TurnPlan([call], names)


async def get_response(
    response_id: str,
    service: Service,
    background: Background,
    tenant: Tenant,
    stream: bool | None = None,
    starting_after: Annotated[int | None, Query(ge=0, le=MOST_NUMBER)] = None,
    _include_obfuscation: Annotated[bool | None, Query(alias="include_obfuscation")] = None,
    _include: Included = None,
) -> Response:
    """The response as it is now; or as a stream, from its beginning or from after the event `starting_after`."""
    stored, progress = await look_up(service, background, response_id, tenant)
    if not stream:
        if starting_after is not None:
            raise refusal("starting_after: only allowed when stream is true.", "starting_after")
        now = stored.response(service.model) if progress is None else stored.head.response(progress.status)
        return JSONResponse(now)
    numbers: EventNumbers = CharacterNumbers(starting_after)
    if not stored.head.is_background:
        if starting_after is not None:
            raise refusal(
                "starting_after: only the events of a response that is made in the background can be told from "
                "within.",
                "starting_after",
            )
        numbers = EventNumbers()
    encoder = ResponseEncoder(stored.head, stored.reader(service.model), numbers)
    turn = FollowedTurn(service, background, response_id, tenant)
    return TurnEventStream(turn, TurnPlan([turn.call]), encoder)


async def delete_response(
    response_id: str, service: Service, background: Background, tenant: Tenant
) -> dict[str, Any]:
    """Deletes a response. If it is still being made, it is cancelled first. Its conversation keeps what it said."""
    stored, progress = await look_up(service, background, response_id, tenant)
    if progress is not None:
        await cancel(service, background, response_id, tenant)
    if stored.body.conversation_id is not None:
        await keep_items(service, stored.body.conversation_id, tenant)
    await forget_response(service, response_id, tenant)
    return {"id": response_id, "object": "response", "deleted": True}


async def cancel_response(
    response_id: str, service: Service, background: Background, tenant: Tenant
) -> Response:
    """Cancels a response. If it has ended already, it stays as it is."""
    stored = await cancel(service, background, response_id, tenant)
    return JSONResponse(stored.response(service.model))


async def list_input_items(
    response_id: str,
    service: Service,
    tenant: Tenant,
    limit: PageSize = 20,
    order: ItemOrder = "desc",
    after: PreviousItem = None,
    _include: Included = None,
) -> dict[str, Any]:
    """The items that the response's request sent."""
    return item_page(await input_items(service, response_id, tenant), limit, order, after)


async def refuse_compaction() -> None:
    raise refusal(
        "Items are not made shorter here: leave out old items yourself.",
        None,
        status=404,
        code="not_supported",
    )


async def refuse_embeddings() -> None:
    raise refusal(
        "Embeddings are not served: Kedge serves models that write.", None, status=404, code="not_supported"
    )
