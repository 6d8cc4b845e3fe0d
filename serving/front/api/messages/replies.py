"""Replies of /v1/messages: an answer's content as blocks, whole or as the events of a stream."""

from __future__ import annotations

import json
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType
from pydantic_core import from_json

from serving.front.api.answers.reader import AnswerPart
from serving.front.api.errors import CLIENT_CLOSED_REQUEST
from serving.front.api.reply_json import Reply
from serving.text.answer_pieces import CallPiece, Thought
from serving.wire.turns import ErrorInfo, ServiceError, TurnEvent, TurnFinish

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
_NO_INPUT = msgspec.Raw(b"{}")


class MessageUsage(Reply, kw_only=True):
    """The input is the sum of its three parts. `cache_creation_input_tokens` is always 0: everything is cached, without
    being asked for."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int


class TextReply(Reply, kw_only=True):
    type: Literal["text"] = "text"
    text: str


class ThinkingReply(Reply, kw_only=True):
    type: Literal["thinking"] = "thinking"
    thinking: str
    signature: str = ""


class ToolUseReply(Reply, kw_only=True):
    type: Literal["tool_use"] = "tool_use"
    id: str
    name: str
    input: msgspec.Raw


Block = TextReply | ThinkingReply | ToolUseReply


class AppliedEdits(Reply, kw_only=True):
    applied_edits: list[Any]


class MessageReply(Reply, kw_only=True):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[Block]
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: MessageUsage
    context_management: AppliedEdits | UnsetType = UNSET


def no_edits(asked: bool) -> AppliedEdits | UnsetType:
    """The reply to a request that asks for edits of its context: none is ever made."""
    return AppliedEdits(applied_edits=[]) if asked else UNSET


def usage_of(output: TurnEvent) -> MessageUsage:
    return MessageUsage(
        input_tokens=output.prompt_tokens - output.cached_tokens,
        cache_read_input_tokens=output.cached_tokens,
        output_tokens=output.completion_tokens,
    )


def stop_of(finish: TurnFinish) -> tuple[StopReason, str | None]:
    """Why the answer ended, and the stop sequence if it was one. Raises ServiceError if the turn was aborted: the
    protocol has no reason for that. Clients do not retry a call that got this status."""
    match finish.reason:
        case "tool_calls":
            return "tool_use", None
        case "length":
            return "max_tokens", None
        case "stop" if isinstance(finish.matched, str):
            return "stop_sequence", finish.matched
        case "stop":
            return "end_turn", None
    message = finish.message or "The turn was aborted."
    raise ServiceError(ErrorInfo(CLIENT_CLOSED_REQUEST, "aborted", message))


def blocks_of(part: AnswerPart) -> list[Block]:
    """The blocks of a whole answer."""
    blocks: list[Block] = []
    for piece in part.pieces:
        if isinstance(piece, CallPiece):
            blocks.append(tool_use_block(piece, _input_of(piece.arguments)))
        elif isinstance(piece, Thought):
            blocks.append(ThinkingReply(thinking=piece.text))
        elif piece:
            blocks.append(TextReply(text=piece))
    return blocks


def tool_use_block(call: CallPiece, arguments: msgspec.Raw = _NO_INPUT) -> ToolUseReply:
    """The block of a call. In a stream the input follows in later events."""
    return ToolUseReply(id=call.call_id or "", name=call.name or "", input=arguments)


def _input_of(arguments: str) -> msgspec.Raw:
    """The call's arguments as the model wrote them; if the call was cut off, the complete part of them."""
    for partial in (False, True):
        try:
            value = from_json(arguments, allow_inf_nan=False, allow_partial=partial)
        except ValueError:
            continue
        if isinstance(value, dict):
            return msgspec.Raw(arguments.encode() if not partial else json.dumps(value).encode())
    return _NO_INPUT
