"""OpenAI's /v1/chat/completions. With `x-session-id` only the new messages are sent."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import Response
from msgspec import UNSET

from engine.api import LogprobParams
from serving.front.api.answers.held import field_names
from serving.front.api.answers.logprobs import answer_logprob
from serving.front.api.answers.reader import answer_fields, reads_thoughts, scope_of
from serving.front.api.answers.tools import ToolUse, tool_use
from serving.front.api.dependencies import Service, Tenant
from serving.front.api.documented_replies import STREAMED
from serving.front.api.errors import refusal
from serving.front.api.fields import new_id, nth_seed
from serving.front.api.named_model import adapter_of, model_for
from serving.front.api.openai.chat_answers import ChatReader
from serving.front.api.openai.chat_schema import (
    ChatBody,
    ChatChoice,
    ChatChunk,
    ChatLogprobs,
    ChatReply,
    ChunkChoice,
    Delta,
)
from serving.front.api.openai.extras import call_fields, chat_prompt_fields
from serving.front.api.openai.prompt_logprobs import prompt_logprob_items
from serving.front.api.openai.replies import (
    ChunkEncoder,
    stop_fields,
    usage_of,
)
from serving.front.api.openai.structured import held_answer
from serving.front.api.reply_json import (
    filled,
    joined_items,
    json_reply,
    list_items,
    reply_json,
)
from serving.front.api.rules import rules_of
from serving.front.api.session_headers import InSession
from serving.front.api.shared_fields import check_stream_options
from serving.front.api.sse import TurnEventStream, server_event
from serving.front.api.strict_json import StrictJsonRoute
from serving.front.api.turn_streams import TurnPlan, beside_streams, collect, until_disconnect
from serving.wire.turns import ChatPrompt, ModelInfo, TextLogprob, TurnCall, TurnEvent

NO_LOGPROBS = ChatLogprobs(content=[])


def routes() -> APIRouter:
    router = APIRouter(route_class=StrictJsonRoute, tags=["OpenAI"])
    router.add_api_route("/v1/chat/completions", chat_completions, methods=["POST"], responses=STREAMED)
    return router


async def chat_completions(
    body: ChatBody,
    request: Request,
    headers: InSession,
    service: Service,
    tenant: Tenant,
) -> Response:
    model = await model_for(service, body.model)
    model_id = adapter_of(body.model, model) or model.model_id
    check_stream_options(body.stream_options, body)
    session = headers.turn(body.n or 1, "n")
    reply_id = f"chatcmpl-{body.request_id or new_id('')}"
    tools = tool_use(body.tools, body.tool_choice, body.parallel_tool_calls, model)
    rules = rules_of(request.app)
    prompt_fields = chat_prompt_fields(body, own_template=rules.request_chat_template)
    fields = call_fields(request, rules, body, session, tenant, model)
    make_plan = partial(_plan, body, tools, reply_id, model, prompt_fields, fields)
    plan = await beside_streams(make_plan, len(body.messages))
    readers = [
        ChatReader(scope_of(call), tools, reads_thoughts(model, call.constraint)) for call in plan.calls
    ]
    if body.stream:
        return TurnEventStream(service, plan, ChatEncoder(body, readers, reply_id, model_id))
    results = await until_disconnect(request.receive, collect(service, plan))
    return json_reply(await _reply(body, readers, reply_id, model_id, results), results)


def _plan(
    body: ChatBody,
    tools: ToolUse,
    reply_id: str,
    model: ModelInfo,
    prompt_fields: dict[str, Any],
    turn_fields: dict[str, Any],
) -> TurnPlan:
    """The calls of the request. `prompt_fields` and `turn_fields` are the fields that the caller has computed."""
    prompt = ChatPrompt(
        tuple(message.for_template() for message in body.messages),
        body.template_kwargs,
        tools.for_template(),
        **prompt_fields,
    )
    logprobs = _logprobs(body)
    held = held_answer(body.response_format, body.structured_outputs, body)
    fields = turn_fields | answer_fields(model, held, tools)
    count = body.n or 1
    calls = [
        TurnCall(
            request_id=reply_id if count == 1 else f"{reply_id}-{index}",
            part_of=reply_id,
            prompt=prompt,
            seed=nth_seed(body.seed, index),
            logprobs=logprobs,
            **fields,
        )
        for index in range(count)
    ]
    return TurnPlan(calls, field_names("messages", held, body.asked_tokens()[1]))


def _logprobs(body: ChatBody) -> LogprobParams | None:
    if body.top_logprobs and not body.logprobs:
        raise refusal("top_logprobs: needs logprobs to be true.", "top_logprobs")
    of_prompt = body.prompt_logprobs
    if not body.logprobs and of_prompt is None:
        return None
    top = max(body.top_logprobs or 0, of_prompt or 0)
    return LogprobParams(bool(body.logprobs), top, None if of_prompt is None else 0)


def _chat_logprob(body: ChatBody, entry: TextLogprob) -> dict[str, Any]:
    by_id = bool(body.return_tokens_as_token_ids)
    return answer_logprob(entry, body.top_logprobs or 0, by_id=by_id)


async def _reply(
    body: ChatBody,
    readers: Sequence[ChatReader],
    reply_id: str,
    model_id: str,
    results: Sequence[TurnEvent],
) -> bytes:
    choices = []
    for index, (reader, result) in enumerate(zip(readers, results, strict=True)):
        choice = ChatChoice(
            index=index,
            message=reader.message(reader.read(result)),
            logprobs=NO_LOGPROBS if body.logprobs else None,
            **stop_fields(body, reader.finish(result), result),
        )
        choices.append(await _with_logprobs(body, reply_json(choice), result.logprobs))
    reply = ChatReply(
        id=reply_id,
        created=int(time.time()),
        model=model_id,
        choices=[],
        usage=usage_of(results),
        prompt_logprobs=UNSET if body.prompt_logprobs is None else [],
    )
    text = reply_json(reply)
    if body.prompt_logprobs is not None:
        items = await prompt_logprob_items(results[0].input_logprobs, body.prompt_logprobs)
        text = filled(text, "prompt_logprobs", items)
    return filled(text, "choices", joined_items(choices))


async def _with_logprobs(body: ChatBody, text: bytes, entries: Sequence[TextLogprob]) -> bytes:
    """Puts the entries into the JSON of a choice, which has NO_LOGPROBS if there are any."""
    if not entries:
        return text
    return filled(text, "content", await list_items(entries, partial(_chat_logprob, body)))


class ChatEncoder(ChunkEncoder):
    """Writes chat chunks. The first chunk of each choice names the role."""

    def __init__(self, body: ChatBody, readers: Sequence[ChatReader], reply_id: str, model_id: str) -> None:
        super().__init__(body, reply_id, model_id, ChatChunk)
        self._body = body
        self._readers = readers
        self._differs = bool(body.wants_usage_everywhere or body.return_token_ids)
        """Whether chunks with content also differ in other fields."""

    async def chunk(self, index: int, event: TurnEvent) -> bytes:
        self._usage.note(index, event)
        reader = self._readers[index]
        part = reader.read(event)
        role: Literal["assistant"] | None = None if index in self._started else "assistant"
        plain = role is None and event.finish is None and not event.logprobs and not self._differs
        if plain and part.is_text:
            return self._text_chunk(index, part.content or "")
        self._started.add(index)
        choice = ChunkChoice(
            index=index,
            delta=reader.delta(part, role, ended=event.finish is not None),
            logprobs=NO_LOGPROBS if event.logprobs else None,
            **stop_fields(self._body, reader.finish(event), event),
        )
        chunk = self._chunk_of(choices=[choice], usage=self._usage_so_far())
        return server_event(await _with_logprobs(self._body, reply_json(chunk), event.logprobs))

    def _choice_of(self, index: int, text: str) -> ChunkChoice:
        return ChunkChoice(index=index, delta=Delta(content=text))
