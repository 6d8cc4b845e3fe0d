"""Replies of the session protocol, whole or as the events of a stream."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from serving.front.api.errors import session_error
from serving.front.api.reply_json import filled, joined_items, list_items, or_unset, reply_json, shown
from serving.front.api.sessions.schema import GenerateBody, GenerateReply, LogprobEntry, MetaInfo
from serving.front.api.sse import DONE, KEEP_ALIVE_COMMENT, error_then_done, server_event
from serving.front.api.turn_streams import TurnPlan
from serving.wire.turns import ErrorInfo, TextLogprob, TurnCall, TurnEvent, TurnFinish

NEW_SHARE = 1 / 128
"""How much of an event must be new, if it also repeats everything before it. So a stream has at most about 128 times
the bytes of its last event. With an event for every token, 4,000 tokens of text would be 61 MB."""

LARGE_EVENT_BYTES = 256 * 1024
NEW_SHARE_OF_LARGE = 1 / 16
"""The same for large events. With an event for every token, 4,000 tokens with twenty log-probabilities each would be
4 GB."""

ID_BYTES = 6
ItemsByField = Mapping[str, bytes]
"""JSON of the entries in each list of log-probabilities."""


async def whole_reply(body: GenerateBody, call: TurnCall, turn: TurnEvent, elapsed_s: float) -> bytes:
    """The reply to one call that is not streamed, as JSON. The turn took `elapsed_s`."""
    return _reply(call, turn, elapsed_s, await _logprob_items(body, turn), None)


class GenerateEncoder:
    """Writes the events of one request. Each has the whole text and all token ids so far; with `incremental`, as with
    SGLang's option of that name, only what is new. Counts are totals in both. An event that repeats everything waits
    until a share of it is new (NEW_SHARE), or the turn ends."""

    keep_alive = KEEP_ALIVE_COMMENT

    def __init__(self, body: GenerateBody, plan: TurnPlan, *, numbered: bool, incremental: bool) -> None:
        self._body = body
        self._calls = plan.calls
        self._numbered = numbered
        self._incremental = incremental
        self._started_s = time.perf_counter()
        self._texts = [""] * len(plan.calls)
        self._token_ids: list[list[int]] = [[] for _ in plan.calls]
        self._written: list[defaultdict[str, list[bytes]]] = [defaultdict(list) for _ in plan.calls]
        """The JSON of each call's log-probabilities so far, so that each entry is written only once."""
        self._told = [_Sent() for _ in plan.calls]

    def accepted(self) -> bytes:
        return b""

    async def chunk(self, index: int, event: TurnEvent) -> bytes:
        new = await _logprob_items(self._body, event)
        if not self._incremental:
            self._add(index, event, new)
            if not self._told[index].may_send(event, new):
                return b""
            event = replace(event, text=self._texts[index], token_ids=tuple(self._token_ids[index]))
            new = {name: joined_items(texts) for name, texts in self._written[index].items()}
        number = index if self._numbered else None
        elapsed_s = time.perf_counter() - self._started_s
        return server_event(_reply(self._calls[index], event, elapsed_s, new, number))

    def closing(self) -> bytes:
        return DONE

    def error(self, info: ErrorInfo) -> bytes:
        return error_then_done(session_error(info))

    def _add(self, index: int, event: TurnEvent, logprobs: ItemsByField) -> None:
        self._texts[index] += event.text
        self._token_ids[index].extend(event.token_ids)
        for name, items in logprobs.items():
            self._written[index][name].append(items)


class _Sent:
    """The approximate size of a call's events: of everything so far, and of the event that was sent last."""

    def __init__(self) -> None:
        self._size_bytes = 0
        self._sent_bytes = 0

    def may_send(self, event: TurnEvent, logprobs: ItemsByField) -> bool:
        """Whether this event is to be sent."""
        ids_bytes = ID_BYTES * len(event.token_ids)
        self._size_bytes += len(event.text) + ids_bytes + sum(map(len, logprobs.values()))
        share = NEW_SHARE_OF_LARGE if self._size_bytes > LARGE_EVENT_BYTES else NEW_SHARE
        new_bytes = self._size_bytes - self._sent_bytes
        if event.finish is None and new_bytes < share * self._size_bytes:
            return False
        self._sent_bytes = self._size_bytes
        return True


def _reply(
    call: TurnCall, said: TurnEvent, elapsed_s: float, logprobs: ItemsByField, number: int | None
) -> bytes:
    no_logprobs: dict[str, Any] = {name: [] for name in logprobs}
    finish = said.finish
    meta = MetaInfo(
        id=call.request_id,
        prompt_tokens=said.prompt_tokens,
        completion_tokens=said.completion_tokens,
        cached_tokens=said.cached_tokens,
        finish_reason=None if finish is None else _finish_reason(finish, said.completion_tokens),
        e2e_latency=elapsed_s,
        replayed=or_unset(said.replayed or None),
        **_draft_fields(said),
        **no_logprobs,
    )
    reply = GenerateReply(
        text=said.text, output_ids=list(said.token_ids), meta_info=meta, index=or_unset(number)
    )
    text = reply_json(reply)
    for name, items in logprobs.items():
        text = filled(text, name, items)
    return text


def _finish_reason(finish: TurnFinish, completion_tokens: int) -> dict[str, Any]:
    match finish.reason:
        case "stop":
            return {"type": "stop", "matched": finish.matched}
        case "length":
            return {"type": "length", "length": completion_tokens}
        case _:
            return {"type": finish.reason, "message": finish.message or "Aborted"}


def _draft_fields(said: TurnEvent) -> dict[str, Any]:
    if not said.draft_tokens:
        return {}
    return {
        "spec_accept_token_num": said.accepted_draft_tokens,
        "spec_draft_token_num": said.draft_tokens,
        "spec_accept_rate": said.accepted_draft_tokens / said.draft_tokens,
    }


async def _logprob_items(body: GenerateBody, output: TurnEvent) -> ItemsByField:
    if not body.return_logprob:
        return {}
    with_text = bool(body.return_text_in_logprobs)

    def entry_of(entry: TextLogprob) -> LogprobEntry:
        return entry.token.logprob, entry.token.token_id, shown(entry.text) if with_text else None

    def top_of(entry: TextLogprob) -> list[LogprobEntry] | None:
        return [
            (logprob, token_id, shown(text) if with_text else None)
            for (token_id, logprob), text in zip(entry.token.top, entry.top_texts, strict=True)
        ] or None

    fields = {
        "output_token_logprobs": await list_items(output.logprobs, entry_of),
        "input_token_logprobs": await list_items(output.input_logprobs, entry_of),
    }
    if body.top_logprobs_num:
        fields["output_top_logprobs"] = await list_items(output.logprobs, top_of)
        fields["input_top_logprobs"] = await list_items(output.input_logprobs, top_of)
    return fields
