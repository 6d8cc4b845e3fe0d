"""What a turn said, as bytes for the session log, and back."""

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
    """Without words, where they were deleted, or the turn is of a version that kept none."""
    said = _DECODER.decode(note.note) if note.note else SaidTurn()
    return TurnTranscript(note.turn_index, note.start_len, note.asked_len, note.end_len, said)


def conversation_of(turns: Iterable[TurnTranscript]) -> tuple[list[Mapping[str, Any]], list[int]]:
    """All messages of a session, and how many there were at the end of each of its turns. An answer is as the model
    wrote it; what is no chat, a prompt of text and what it was answered, has the role `text`."""
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
            )  # one that is answered anew has no new messages
            messages.append({"role": "assistant" if is_chat else "text", "content": said.answer})
        ends.append(len(messages))
    return messages, ends
