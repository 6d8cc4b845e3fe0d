"""Log-probabilities: of an answer's tokens in OpenAI's form; of a prompt's tokens, and by token ids, in vLLM's form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from serving.front.api.openai.replies import finite, top_choices
from serving.front.api.reply_json import list_items, reply_json, shown
from serving.wire.turns import TextLogprob


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


async def prompt_logprob_items(entries: Sequence[TextLogprob], most: int) -> bytes:
    """JSON of the entries of `prompt_logprobs`. Each has, by token id, the token itself and the likeliest tokens in its
    place, at most `most`. The first entry is null, because nothing comes before it."""

    def entry_of(entry: TextLogprob) -> dict[str, Any] | None:
        token = entry.token
        if token.logprob is None:
            return None
        told = {str(token.token_id): _told(token.logprob, None, entry.text)}
        likely = zip(token.top[:most], entry.top_texts, strict=False)
        for rank, ((token_id, logprob), text) in enumerate(likely, 1):
            told[str(token_id)] = _told(logprob, rank, text)
        return told

    return await list_items(entries, entry_of)


def _told(logprob: float, rank: int | None, text: bytes) -> dict[str, Any]:
    """`rank`: the token's place among all tokens, 1 for the likeliest; None if it is not known."""
    return {"logprob": finite(logprob), "rank": rank, "decoded_token": shown(text)}
