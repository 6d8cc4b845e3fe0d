"""Log-probabilities of an answer's tokens, in OpenAI's form."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from serving.front.api.reply_json import reply_json, shown
from serving.wire.turns import TextLogprob

_LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON does not have."""


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _LOWEST_LOGPROB


def top_choices(entry: TextLogprob, most: int) -> list[tuple[bytes, int, float]]:
    """The likeliest tokens, at most `most`: text, id and log-probability."""
    pairs = zip(entry.top_texts, entry.token.top, strict=True)
    return [(text, token_id, finite(logprob)) for text, (token_id, logprob) in pairs][:most]


def token_name(text: bytes, token_id: int, *, by_id: bool) -> str:
    return f"token_id:{token_id}" if by_id else shown(text)


def answer_logprob(entry: TextLogprob, most: int, *, by_id: bool = False) -> dict[str, Any]:
    """The log-probabilities of a token, and of the likeliest tokens in its place, at most `most`."""

    def told(text: bytes, token_id: int, logprob: float) -> dict[str, Any]:
        return {"token": token_name(text, token_id, by_id=by_id), "logprob": logprob, "bytes": list(text)}

    likely = [told(*choice) for choice in top_choices(entry, most)]
    token = entry.token
    return {**told(entry.text, token.token_id, finite(token.logprob or 0.0)), "top_logprobs": likely}


def logprob_json(entry: TextLogprob, most: int) -> msgspec.Raw:
    """The same as JSON, which is encoded only once, however often it is sent."""
    return msgspec.Raw(reply_json(answer_logprob(entry, most)))
