"""OpenAI's /v1/completions: one or many prompts, as text or token ids."""

from __future__ import annotations

import codecs
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import product
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from msgspec import UNSET

from engine.api import LogprobParams
from serving.front.api.answers.held import field_names
from serving.front.api.answers.logprobs import finite, token_name, top_choices
from serving.front.api.dependencies import Service, Tenant
from serving.front.api.documented_replies import STREAMED
from serving.front.api.errors import refusal
from serving.front.api.fields import check_num_calls, check_token_ids, new_id, nth_seed
from serving.front.api.named_model import adapter_of, model_for
from serving.front.api.openai.completions_schema import (
    CompletionBody,
    CompletionChoice,
    CompletionLogprobs,
    CompletionReply,
)
from serving.front.api.openai.extras import call_fields
from serving.front.api.openai.prompt_logprobs import prompt_logprob_items
from serving.front.api.openai.replies import ChunkEncoder, stop_fields
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
from serving.front.api.turn_streams import TurnPlan, collect, until_disconnect
from serving.wire.turns import (
    ModelInfo,
    TextLogprob,
    TextPrompt,
    TokenPrompt,
    TurnCall,
    TurnEvent,
)

NO_LOGPROBS = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
Prompts = Sequence[TextPrompt | TokenPrompt]


def routes() -> APIRouter:
    router = APIRouter(route_class=StrictJsonRoute, tags=["OpenAI"])
    router.add_api_route("/v1/completions", completions, methods=["POST"], responses=STREAMED)
    return router


async def completions(
    body: CompletionBody,
    request: Request,
    headers: InSession,
    service: Service,
    tenant: Tenant,
) -> Response:
    model = await model_for(service, body.model)
    model_id = adapter_of(body.model, model) or model.model_id
    prompts = body.prompts()
    _check(body, prompts, model)
    if headers.mode not in (None, "append"):
        raise refusal("x-session-mode: a prompt is added to its session: append.", "x-session-mode")
    num_calls = len(prompts) * (body.n or 1)
    session = headers.turn(num_calls, "n" if body.n else "prompt", unsaid_mode="append")
    if session is not None and body.echo:
        raise refusal("echo: not possible in a session, which holds more than this prompt.", "echo")
    if body.echo and body.truncate_prompt_tokens is not None:
        raise refusal("echo: not possible with truncate_prompt_tokens.", "echo")
    reply_id = f"cmpl-{body.request_id or new_id('')}"
    rules = rules_of(request.app)
    fields = call_fields(request, rules, body, session, tenant, model)
    plan = _plan(body, prompts, reply_id, fields)
    encoder = CompletionEncoder(body, prompts, reply_id, model_id)
    if body.stream:
        return TurnEventStream(service, plan, encoder)
    results = await until_disconnect(request.receive, collect(service, plan))
    return json_reply(await encoder.whole(results), results)


def _check(body: CompletionBody, prompts: Prompts, model: ModelInfo) -> None:
    check_stream_options(body.stream_options, body)
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise refusal("best_of: only the value of n is supported.", "best_of")
    check_num_calls(len(prompts) * (body.n or 1), "prompt" if len(prompts) > 1 else "n")
    for index, prompt in enumerate(prompts):
        if isinstance(prompt, TokenPrompt):
            check_token_ids(prompt.token_ids, model, "prompt" if len(prompts) == 1 else f"prompt[{index}]")


def _plan(body: CompletionBody, prompts: Prompts, reply_id: str, turn_fields: dict[str, Any]) -> TurnPlan:
    held = held_answer(body.response_format, body.structured_outputs, body)
    choices = range(body.n or 1)
    calls = [
        TurnCall(
            request_id=f"{reply_id}-{index}" if len(prompts) * len(choices) > 1 else reply_id,
            part_of=reply_id,
            prompt=prompt,
            seed=nth_seed(body.seed, choice),
            logprobs=_logprobs(body, prompt),
            constraint=None if held is None else held.constraint,
            **turn_fields,
        )
        for index, (prompt, choice) in enumerate(product(prompts, choices))
    ]
    several = [f"prompt[{index // len(choices)}]" for index in range(len(calls))] if len(prompts) > 1 else ()
    return TurnPlan(calls, field_names("prompt", held), prompt_fields=several)


def _logprobs(body: CompletionBody, prompt: TextPrompt | TokenPrompt) -> LogprobParams | None:
    """Also asks for input log-probabilities if token ids are echoed: only replicas have the tokenizer, and these
    entries have the tokens' texts."""
    scored = body.logprobs is not None
    of_prompt = body.prompt_logprobs is not None
    echoed = bool(body.echo) and (scored or isinstance(prompt, TokenPrompt))
    if not (scored or of_prompt or echoed):
        return None
    top = max(body.logprobs or 0, body.prompt_logprobs or 0)
    return LogprobParams(scored, top, 0 if of_prompt or echoed else None)


def _bytes_of(entries: Iterable[TextLogprob]) -> bytes:
    return b"".join(entry.text for entry in entries)


def _utf8() -> codecs.IncrementalDecoder:
    return codecs.getincrementaldecoder("utf-8")("replace")


class TextPlace:
    """Where in a choice's text a token begins, in characters. A token's bytes may be only a part of a character."""

    def __init__(self) -> None:
        self._decoder = _utf8()
        self._offset = 0

    def pass_by(self, token_text: bytes) -> int:
        """Passes a token; returns its offset."""
        begin = self._offset
        self._offset += len(self._decoder.decode(token_text))
        return begin


class CompletionEncoder(ChunkEncoder):
    """Writes chunks and whole replies. Keeps its place in each choice's text."""

    def __init__(self, body: CompletionBody, prompts: Prompts, reply_id: str, model_id: str) -> None:
        super().__init__(body, reply_id, model_id, CompletionReply)
        self._body = body
        self._prompts = prompts
        self._num_choices = body.n or 1
        self._differs = bool(
            body.wants_usage_everywhere
            or body.return_token_ids
            or body.logprobs is not None
            or body.prompt_logprobs is not None
        )
        """Whether a choice's chunks also differ in other fields than the text."""
        self._places: defaultdict[int, TextPlace] = defaultdict(TextPlace)
        self._echoes: defaultdict[int, codecs.IncrementalDecoder] = defaultdict(_utf8)

    async def chunk(self, index: int, event: TurnEvent) -> bytes:
        if index in self._started and event.finish is None and not self._differs:
            self._usage.note(index, event)
            return self._text_chunk(index, self._text(index, event))
        choice = self._choice(index, event)
        reply = self._chunk_of(choices=[choice], usage=self._usage_so_far())
        return server_event(await self._with_logprobs(reply_json(reply), index, event))

    def _choice_of(self, index: int, text: str) -> CompletionChoice:
        return CompletionChoice(index=index, text=text)

    async def whole(self, results: Sequence[TurnEvent]) -> bytes:
        """The reply to a request that is not streamed."""
        choices = [
            await self._with_logprobs(reply_json(self._choice(index, result)), index, result)
            for index, result in enumerate(results)
        ]
        reply = self._chunk_of(choices=[], usage=self._usage.usage())
        return filled(reply_json(reply), "choices", joined_items(choices))

    def _choice(self, index: int, output: TurnEvent) -> CompletionChoice:
        self._usage.note(index, output)
        text = self._text(index, output)
        self._started.add(index)
        return CompletionChoice(
            index=index,
            text=text,
            logprobs=NO_LOGPROBS if self._logprobs(output) else None,
            prompt_logprobs=UNSET if self._body.prompt_logprobs is None else [],
            **stop_fields(self._body, output.finish, output),
        )

    def _text(self, index: int, output: TurnEvent) -> str:
        return self._echoed(index, output) + output.text if self._body.echo else output.text

    def _echoed(self, index: int, output: TurnEvent) -> str:
        """The part of the prompt that this event echoes. Token ids have their text from the replica, which sends it as
        it computes the prompt."""
        prompt = self._prompts[index // self._num_choices]
        if isinstance(prompt, TextPrompt):
            return "" if index in self._started else prompt.text
        computed = bool(output.token_ids) or output.finish is not None
        return self._echoes[index].decode(_bytes_of(output.input_logprobs), final=computed)

    def _logprobs(self, output: TurnEvent) -> Sequence[TextLogprob]:
        """Log-probabilities of the choice's text, an echoed prompt included."""
        if self._body.logprobs is None:
            return ()
        return (*(output.input_logprobs if self._body.echo else ()), *output.logprobs)

    async def _with_logprobs(self, text: bytes, index: int, output: TurnEvent) -> bytes:
        """Puts the log-probabilities into the JSON of a choice, which has NO_LOGPROBS if there are any."""
        if self._body.prompt_logprobs is not None:
            of_prompt = await prompt_logprob_items(output.input_logprobs, self._body.prompt_logprobs)
            text = filled(text, "prompt_logprobs", of_prompt)
        entries, place = self._logprobs(output), self._places[index]
        if not entries:
            return text
        by_id = bool(self._body.return_tokens_as_token_ids)
        lists: dict[str, Callable[[TextLogprob], Any]] = {
            "tokens": lambda entry: token_name(entry.text, entry.token.token_id, by_id=by_id),
            "token_logprobs": _token_logprob,
            "top_logprobs": partial(_top_logprobs, self._body),
            "text_offset": lambda entry: place.pass_by(entry.text),
        }
        for name, shape in lists.items():
            text = filled(text, name, await list_items(entries, shape))
        return text


def _token_logprob(entry: TextLogprob) -> float | None:
    return None if entry.token.logprob is None else finite(entry.token.logprob)


def _top_logprobs(body: CompletionBody, entry: TextLogprob) -> dict[str, float] | None:
    """Those of the likeliest tokens, and of the token itself, which may be none of them."""
    by_id = bool(body.return_tokens_as_token_ids)
    likely = top_choices(entry, body.logprobs or 0)
    told = {token_name(text, token_id, by_id=by_id): logprob for text, token_id, logprob in likely}
    own = _token_logprob(entry)
    if own is not None:
        told.setdefault(token_name(entry.text, entry.token.token_id, by_id=by_id), own)
    return told or None
