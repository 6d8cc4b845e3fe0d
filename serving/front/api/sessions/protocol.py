"""The session protocol: SGLang's native API. docs/api/sessions.md describes it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from msgspec.structs import replace

from engine.api import LogprobParams, SamplingParams
from serving.front.api.affinity import AffinityKeys
from serving.front.api.dependencies import OPERATORS_ONLY, Service, Tenant
from serving.front.api.documented_replies import PLAIN_TEXT, STREAMED
from serving.front.api.errors import refusal
from serving.front.api.field_names import FieldNames
from serving.front.api.fields import check_num_calls, check_token_ids, new_id, nth_seed, stop_strings
from serving.front.api.hidden_sessions import check_not_hidden
from serving.front.api.named_model import model_for
from serving.front.api.priorities import engine_priority
from serving.front.api.reply_json import joined_items, json_reply
from serving.front.api.rules import rules_of
from serving.front.api.service import TurnService
from serving.front.api.session_headers import IdempotencyHeader
from serving.front.api.sessions.replies import GenerateEncoder, whole_reply
from serving.front.api.sessions.schema import (
    AbortBody,
    CloseSessionBody,
    GenerateBody,
    OpenSessionBody,
    SamplingBody,
    SessionParams,
)
from serving.front.api.sessions.trees import TreeRequest, close_tree
from serving.front.api.sse import TurnEventStream
from serving.front.api.strict_json import StrictJsonRoute
from serving.front.api.turn_streams import RunsTurns, TurnPlan, collect, until_disconnect
from serving.wire.turns import ModelInfo, SessionTurn, TextPrompt, TokenPrompt, TurnCall


def routes() -> APIRouter:
    router = APIRouter(route_class=StrictJsonRoute, tags=["sessions"])
    router.add_api_route("/open_session", open_session, methods=["POST"])
    router.add_api_route("/close_session", close_session, methods=["POST"], response_class=Response)
    router.add_api_route("/generate", generate, methods=["POST"], responses=STREAMED)
    router.add_api_route("/abort_request", abort_request, methods=["POST"], response_class=Response)
    router.add_api_route(
        "/flush_cache",
        flush_cache,
        methods=["POST"],
        response_class=Response,
        responses=PLAIN_TEXT,
        dependencies=OPERATORS_ONLY,
    )
    for name in ("/get_model_info", "/model_info"):
        router.add_api_route(name, get_model_info, methods=["GET"])
    for name in ("/get_server_info", "/server_info"):
        router.add_api_route(name, get_server_info, methods=["GET"], dependencies=OPERATORS_ONLY)
    router.add_api_route("/get_load", get_load, methods=["GET"], dependencies=OPERATORS_ONLY)
    router.add_api_route("/health_generate", health_generate, methods=["GET"], response_class=Response)
    return router


async def open_session(body: OpenSessionBody, service: Service, tenant: Tenant) -> str:
    with FieldNames({"timeout_s": "timeout"}).in_errors():
        return await service.open_session(
            body.session_id,
            timeout_s=body.timeout,
            capacity_tokens=None,
            tenant=tenant,
            tree=not body.streaming,
        )


async def close_session(body: CloseSessionBody, service: Service, tenant: Tenant) -> Response:
    await service.close_session(body.session_id, tenant=tenant)
    await close_tree(service, body.session_id, tenant)
    return Response()


async def abort_request(body: AbortBody, service: Service, tenant: Tenant) -> Response:
    if not body.rid and not body.abort_all:
        raise refusal("rid: name a request, or set abort_all.", "rid")
    await service.abort(body.rid or None, all_requests=body.abort_all, tenant=tenant)
    return Response()


async def flush_cache(service: Service) -> Response:
    if await service.flush():
        return PlainTextResponse("Cache flushed.")
    raise refusal("The cache is not flushed while requests run.", None, code="busy")


async def get_model_info(service: Service) -> dict[str, Any]:
    model = service.model
    return {
        "model_path": model.model_path,
        "tokenizer_path": model.tokenizer_path,
        "is_generation": True,
        "max_context_len": model.max_context_len,
    }


async def get_server_info(service: Service) -> Response:
    return JSONResponse(await service.server_info())


async def get_load(service: Service) -> list[dict[str, Any]]:
    """The load of each replica that answers. `num_tokens`: tokens of KV in use, by sessions and requests."""
    return [
        {
            "dp_rank": rank,
            "replica_id": replica["replica_id"],
            "num_reqs": replica["running"] + replica["waiting"],
            "num_waiting_reqs": replica["waiting"],
            "num_tokens": _pages_in_use(replica["pages"]) * replica["page_size"],
        }
        for rank, replica in enumerate((await service.server_info())["replicas"])
    ]


def _pages_in_use(pages: dict[str, int]) -> int:
    return pages["total"] - pages["free"] - pages["cached"]


async def health_generate(request: Request, service: Service, tenant: Tenant) -> Response:
    """Healthy if a replica generates a token. The turn counts as one of its caller's tenant."""
    call = TurnCall(
        new_id("health-"),
        TokenPrompt((0,)),
        SamplingParams(temperature=0.0, ignore_eos=True),
        max_new_tokens=1,
        tenant=tenant,
    )
    await until_disconnect(request.receive, collect(service, TurnPlan([call])))
    return Response()


async def generate(
    body: GenerateBody,
    request: Request,
    service: Service,
    tenant: Tenant,
    idempotency_key: IdempotencyHeader = None,
) -> Response:
    rules = rules_of(request.app)
    priority = engine_priority(rules.request_priority, higher_first=body.priority)
    named = body.lora_path if isinstance(body.lora_path, list) else [body.lora_path]
    model = await model_for(service, *named)
    plan = _plan(body, model, tenant, priority, AffinityKeys.of(request).key())
    runner: RunsTurns = service
    if body.session_params is not None:
        plan, runner = await _in_session(plan, body.session_params, idempotency_key, service)
    as_list = body.batched or body.choices > 1
    if body.stream:
        encoder = GenerateEncoder(
            body, plan, numbered=as_list, incremental=rules.incremental_streaming_output
        )
        return TurnEventStream(runner, plan, encoder)
    started_s, ended_s = time.perf_counter(), [0.0] * len(plan.calls)

    def ended(index: int) -> None:
        ended_s[index] = time.perf_counter()

    turns = await until_disconnect(request.receive, collect(runner, plan, ended))
    replies = [
        await whole_reply(body, call, turn, at_s - started_s)
        for call, turn, at_s in zip(plan.calls, turns, ended_s, strict=True)
    ]
    return json_reply(b"[%s]" % joined_items(replies) if as_list else replies[0], turns)


async def _in_session(
    plan: TurnPlan, params: SessionParams, idempotency_key: str | None, service: TurnService
) -> tuple[TurnPlan, RunsTurns]:
    """The plan of one call as a turn of the session, and what runs it. Raises ServiceError, which names the field."""
    (call,) = plan.calls
    runner: RunsTurns = service
    with plan.names.in_errors():
        if await service.is_tree(params.id, tenant=call.tenant):
            runner = request = TreeRequest(service, params, call.request_id, call.tenant)
            turn = await request.begin(idempotency_key)
        else:
            turn = _line_turn(params, idempotency_key)
    return dataclasses.replace(plan, calls=[replace(call, session=turn)]), runner


def _line_turn(params: SessionParams, idempotency_key: str | None) -> SessionTurn:
    check_not_hidden(params.id, "session_params.id")
    for name in ("offset", "replace", "drop_previous_output"):
        if getattr(params, name):
            raise refusal(
                f"session_params.{name}: a session that was opened with streaming is a line of turns. "
                f"POST /v1/kedge/sessions/{params.id}/rewind goes back in it.",
                f"session_params.{name}",
            )
    return SessionTurn(params.id, idempotency_key=idempotency_key, create=False)


def _plan(body: GenerateBody, model: ModelInfo, tenant: str, priority: int, affinity_key: str) -> TurnPlan:
    prompts = _prompts(body, model)
    count = body.choices
    num_calls = len(prompts) * count
    many = "sampling_params.n" if count > 1 else body.prompt_field
    check_num_calls(num_calls, many)
    if body.session_params is not None and num_calls > 1:
        raise refusal(f"{many}: a session takes one generation at a time.", many)
    asked = _asked(body, len(prompts))
    sampled = _sampled(asked, model)
    adapters = _adapters(body, len(prompts), model)
    calls = [
        TurnCall(
            request_id=request_id,
            part_of=whole_id,
            prompt=prompts[index // count],
            seed=nth_seed(asked[index // count].seed_given, index % count),
            logprobs=_logprobs(body),
            tenant=tenant,
            priority=priority,
            affinity_key=affinity_key,
            adapter=adapters[index // count],
            **sampled[index // count],
        )
        for index, (request_id, whole_id) in enumerate(_request_ids(body, len(prompts)))
    ]
    return TurnPlan(calls, FieldNames(_field_names(body.prompt_field)))


def _prompts(body: GenerateBody, model: ModelInfo) -> list[TextPrompt | TokenPrompt]:
    given = body.text if body.text is not None else body.input_ids
    assert given is not None
    many: Sequence[Any] = given if body.batched else [given]
    prompts: list[TextPrompt | TokenPrompt] = []
    for index, prompt in enumerate(many):
        if isinstance(prompt, str):
            prompts.append(TextPrompt(prompt))
            continue
        check_token_ids(prompt, model, f"input_ids[{index}]" if body.batched else "input_ids")
        prompts.append(TokenPrompt(tuple(prompt)))
    return prompts


def _asked(body: GenerateBody, num_prompts: int) -> list[SamplingBody]:
    """The sampling parameters of each prompt."""
    given = body.sampling_params or SamplingBody()
    if not isinstance(given, list):
        return [given] * num_prompts
    if not body.batched or len(given) != num_prompts:
        message = "sampling_params: a list belongs to a list of prompts, and has one object for each."
        raise refusal(message, "sampling_params")
    if any(each.n != given[0].n for each in given):
        raise refusal("sampling_params: n must be the same for all prompts.", "sampling_params")
    return given


def _sampled(asked: Sequence[SamplingBody], model: ModelInfo) -> list[dict[str, Any]]:
    """The fields of each prompt's calls that say how its answers are sampled; the seed is each call's own."""
    if all(each is asked[0] for each in asked):
        return [_sampling_fields(asked[0], "sampling_params", model)] * len(asked)
    return [_sampling_fields(each, f"sampling_params[{index}]", model) for index, each in enumerate(asked)]


def _sampling_fields(asked: SamplingBody, name: str, model: ModelInfo) -> dict[str, Any]:
    return {
        "sampling": asked.sampling(model, name),
        "max_new_tokens": asked.max_new_tokens,
        "stop": stop_strings(asked.stop),
        "trim_stop": not asked.no_stop_trim,
        "skip_special_tokens": asked.skip_special_tokens,
        "constraint": asked.constraint(name),
    }


def _adapters(body: GenerateBody, num_prompts: int, model: ModelInfo) -> list[str]:
    """The adapter of each prompt; "" is none."""
    given = body.lora_path
    adapters = [name or "" for name in given] if isinstance(given, list) else [given or ""] * num_prompts
    if len(adapters) != num_prompts:
        raise refusal(f"lora_path: give {num_prompts} adapters, one for each prompt.", "lora_path")
    for name in adapters:
        if name and name not in model.adapters:
            raise refusal(
                f"lora_path: the adapter {name!r} does not exist.", "lora_path", code="model_not_found"
            )
    return adapters


def _request_ids(body: GenerateBody, num_prompts: int) -> list[tuple[str, str]]:
    """For each call its id, and the client's id of which it is a part. A call's id is the client's, numbered if that is
    for several prompts, and if a prompt has several choices."""
    count = body.choices
    if isinstance(body.rid, list):
        if len(body.rid) != num_prompts or len(set(body.rid)) != len(body.rid):
            raise refusal(f"rid: give {num_prompts} different ids, one for each prompt.", "rid")
        ids = [(rid, rid) for rid in body.rid]
    else:
        rid = body.rid or new_id("")
        ids = [(rid if num_prompts == 1 else f"{rid}_{index}", rid) for index in range(num_prompts)]
    return (
        ids if count == 1 else [(f"{rid}_{choice}", whole) for rid, whole in ids for choice in range(count)]
    )


def _logprobs(body: GenerateBody) -> LogprobParams | None:
    if not body.return_logprob:
        return None
    start = body.logprob_start_len
    return LogprobParams(
        output=True, top=body.top_logprobs_num or 0, input_start=None if start is None or start < 0 else start
    )


def _field_names(prompt_field: str) -> dict[str, str]:
    """The names that this protocol has for the fields that the service names in its errors."""
    sampling = {name: f"sampling_params.{name}" for name in SamplingParams.__dataclass_fields__}
    return {
        **sampling,
        "prompt": prompt_field,
        "input_ids": prompt_field,
        "stop": "sampling_params.stop",
        "json_schema": "sampling_params.json_schema",
        "regex": "sampling_params.regex",
        "grammar": "sampling_params.ebnf",
        "session_id": "session_params.id",
        "idempotency_key": "idempotency-key",
        "model": "lora_path",
    }
