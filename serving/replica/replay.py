"""A turn's answer as bytes for the session log, and back: a retried turn is answered from it, not run again."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from engine.api import TokenLogprob
from serving.wire.turns import TextLogprob, TurnEvent, TurnFinish


def encode_result(event: TurnEvent) -> bytes:
    """The whole turn, as one event, in JSON."""
    return json.dumps(asdict(event), separators=(",", ":"), allow_nan=True).encode()


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
        replayed=True,
    )


def _logprob(fields: dict[str, Any]) -> TextLogprob:
    token = fields["token"]
    top = tuple((int(token_id), float(logprob)) for token_id, logprob in token["top"])
    return TextLogprob(
        token=TokenLogprob(token["token_id"], token["logprob"], top),
        text=fields["text"],
        top_texts=tuple(fields["top_texts"]),
    )
