"""A turn's answer as bytes for the session log, and back. A retried turn gets the logged answer and does not run
again."""

from __future__ import annotations

import json
from typing import Any

from msgspec.structs import asdict, replace

from engine.api import TokenLogprob
from serving.wire.turns import TextLogprob, TurnEvent, TurnFinish

MOST_LOGPROBS = 16_384
"""The most log-probabilities (of tokens and their alternatives) that an answer in the log may have. They take half a
megabyte, and some 20 ms of the event loop. With those of a long answer the log would grow by megabytes per turn, and
replica and controller would stand still while it is written."""


def encode_result(event: TurnEvent) -> bytes:
    """Encodes the whole turn, as one event, in JSON. If it has more than MOST_LOGPROBS log-probabilities, all are left
    out."""
    entries = (*event.logprobs, *event.input_logprobs)
    if len(entries) + sum(len(entry.token.top) for entry in entries) > MOST_LOGPROBS:
        event = replace(event, logprobs=(), input_logprobs=())
    fields = asdict(event)
    fields["finish"] = None if event.finish is None else asdict(event.finish)
    fields["error"] = None if event.error is None else asdict(event.error)
    fields["logprobs"] = [_fields(entry) for entry in event.logprobs]
    fields["input_logprobs"] = [_fields(entry) for entry in event.input_logprobs]
    return json.dumps(fields, separators=(",", ":"), allow_nan=True).encode()


def decode_result(data: bytes) -> TurnEvent:
    """The event that `encode_result` was given, marked as replayed."""
    fields: dict[str, Any] = json.loads(data)
    return TurnEvent(
        text=fields["text"],
        token_ids=tuple(fields["token_ids"]),
        prompt_tokens=fields["prompt_tokens"],
        cached_tokens=fields["cached_tokens"],
        completion_tokens=fields["completion_tokens"],
        logprobs=tuple(map(_logprob, fields["logprobs"])),
        input_logprobs=tuple(map(_logprob, fields["input_logprobs"])),
        finish=TurnFinish(*(fields["finish"][name] for name in ("reason", "matched", "message"))),
        # Answers logged by earlier versions lack some of these.
        draft_tokens=fields.get("draft_tokens", 0),
        accepted_draft_tokens=fields.get("accepted_draft_tokens", 0),
        turn_index=fields.get("turn_index"),
        tokenizer=fields.get("tokenizer"),
        in_thought=fields.get("in_thought", False),
        ended_s=fields.get("ended_s"),
        replayed=True,
    )


def _fields(entry: TextLogprob) -> dict[str, Any]:
    """An entry as JSON can hold it. Bytes that are not valid UTF-8 become surrogate escapes."""
    token = entry.token
    own = {"token_id": token.token_id, "logprob": token.logprob, "top": token.top}
    return {"token": own, "text": _text(entry.text), "top_texts": list(map(_text, entry.top_texts))}


def _logprob(fields: dict[str, Any]) -> TextLogprob:
    token = fields["token"]
    top = tuple((int(token_id), float(logprob)) for token_id, logprob in token["top"])
    return TextLogprob(
        token=TokenLogprob(token["token_id"], token["logprob"], top),
        text=_bytes(fields["text"]),
        top_texts=tuple(map(_bytes, fields["top_texts"])),
    )


def _text(token: bytes) -> str:
    return token.decode("utf-8", "surrogateescape")


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")
