"""The events of a streamed answer of /v1/messages: blocks one after another, each with a start, deltas and a stop."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from serving.front.api.answers.reader import AnswerPart, AnswerReader
from serving.front.api.errors import messages_error
from serving.front.api.messages.replies import (
    Block,
    MessageReply,
    TextReply,
    ThinkingReply,
    ToolUseReply,
    no_edits,
    stop_of,
    tool_use_block,
    usage_of,
)
from serving.front.api.sse import typed_event
from serving.text.answer_pieces import CallPiece, Thought
from serving.wire.turns import ErrorInfo, TurnEvent

Event = dict[str, Any]


class MessageEncoder:
    """Writes the events of one message."""

    keep_alive = typed_event({"type": "ping"})

    def __init__(self, reader: AnswerReader, reply_id: str, model_id: str, *, edits_asked: bool) -> None:
        self._reader = reader
        self._reply_id = reply_id
        self._model_id = model_id
        self._edits_asked = edits_asked
        self._blocks = BlockEvents()
        self._started = False

    def accepted(self) -> bytes:
        return b""

    async def chunk(self, index: int, event: TurnEvent) -> bytes:
        assert index == 0
        return b"".join(map(typed_event, self._events(event)))

    def closing(self) -> bytes:
        return typed_event({"type": "message_stop"})

    def error(self, info: ErrorInfo) -> bytes:
        return typed_event(messages_error(info))

    def _events(self, event: TurnEvent) -> Iterator[Event]:
        if not self._started:
            self._started = True
            message = MessageReply(id=self._reply_id, model=self._model_id, content=[], usage=usage_of(event))
            yield {"type": "message_start", "message": message}
            yield {"type": "ping"}
        yield from self._blocks.add(self._reader.read(event))
        finish = self._reader.finish(event)
        if finish is None:
            return
        yield from self._blocks.end()
        reason, sequence = stop_of(finish)
        told: Event = {
            "type": "message_delta",
            "delta": {"stop_reason": reason, "stop_sequence": sequence},
            "usage": usage_of(event),
        }
        if self._edits_asked:
            told["context_management"] = no_edits(asked=True)
        yield told


@dataclass(frozen=True, slots=True)
class _Open:
    """The block that is open; if it is a call, also the call's index."""

    kind: type[Block]
    call: int | None = None


class BlockEvents:
    """The block events of one answer. One block is open at a time. A piece of another kind, or of another call, ends
    it."""

    def __init__(self) -> None:
        self._open: _Open | None = None
        self._num_blocks = 0

    def add(self, part: AnswerPart) -> Iterator[Event]:
        for piece in part.pieces:
            if isinstance(piece, CallPiece):
                yield from self._call(piece)
            elif isinstance(piece, Thought):
                yield from self._in(_Open(ThinkingReply), ThinkingReply(thinking=""))
                yield self._delta({"type": "thinking_delta", "thinking": piece.text})
            elif piece:
                yield from self._in(_Open(TextReply), TextReply(text=""))
                yield self._delta({"type": "text_delta", "text": piece})

    def end(self) -> Iterable[Event]:
        """Ends the block that is open, if one is."""
        if self._open is None:
            return
        if self._open.kind is ThinkingReply:
            yield self._delta({"type": "signature_delta", "signature": ""})
        yield {"type": "content_block_stop", "index": self._num_blocks - 1}
        self._open = None

    def _call(self, call: CallPiece) -> Iterator[Event]:
        yield from self._in(_Open(ToolUseReply, call.index), tool_use_block(call))
        if call.arguments:
            yield self._delta({"type": "input_json_delta", "partial_json": call.arguments})

    def _in(self, wanted: _Open, block: Block) -> Iterator[Event]:
        """Begins the block unless it is open."""
        if self._open == wanted:
            return
        yield from self.end()
        yield {"type": "content_block_start", "index": self._num_blocks, "content_block": block}
        self._open = wanted
        self._num_blocks += 1

    def _delta(self, delta: Event) -> Event:
        return {"type": "content_block_delta", "index": self._num_blocks - 1, "delta": delta}
