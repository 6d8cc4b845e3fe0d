"""What a turn said, as bytes for the session log and back, and a session's messages from its turns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from controllers.records import TurnNote
from serving.wire.turns import SaidTurn, TurnTranscript

_DECODER = msgspec.msgpack.Decoder(SaidTurn)


def encode_said(said: SaidTurn) -> bytes:
    return msgspec.msgpack.encode(said)


def transcript_of(note: TurnNote) -> TurnTranscript:
    """The transcript of a turn. It has no words if these were deleted, or if an earlier version did not keep them."""
    said = _DECODER.decode(note.note) if note.note else SaidTurn()
    return TurnTranscript(note.turn_index, note.start_len, note.asked_len, note.end_len, said)


def conversation_of(turns: Iterable[TurnTranscript]) -> tuple[list[Mapping[str, Any]], list[int]]:
    """All messages of a session, and how many there were at the end of each turn. Answers are as the model wrote them.
    A text prompt and its answer have the role `text`."""
    messages: list[Mapping[str, Any]] = []
    ends = []
    for turn in turns:
        said = turn.said
        if said.num_kept is not None:
            del messages[said.num_kept :]
        messages += said.messages
        if said.text is not None:
            messages.append({"role": "text", "content": said.text})
        if said.finish is not None:
            is_chat = (
                said.messages or said.num_kept is not None
            )  # a chat that is answered again has no new messages
            messages.append({"role": "assistant" if is_chat else "text", "content": said.answer})
        ends.append(len(messages))
    return messages, ends
