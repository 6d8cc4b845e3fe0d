"""Log-probabilities: of an answer's tokens as OpenAI tells them; of a prompt's, and by token ids, as vLLM does."""

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
    """Of a token, and of the `most` likely ones in its place."""

    def told(text: bytes, token_id: int, logprob: float) -> dict[str, Any]:
        return {"token": token_name(text, token_id, by_id=by_id), "logprob": logprob, "bytes": list(text)}

    likely = [told(*choice) for choice in top_choices(entry, most)]
    token = entry.token
    return {**told(entry.text, token.token_id, finite(token.logprob or 0.0)), "top_logprobs": likely}


def logprob_json(entry: TextLogprob, most: int) -> msgspec.Raw:
    """The same as JSON that is written once, however often it is told."""
    return msgspec.Raw(reply_json(answer_logprob(entry, most)))


async def prompt_logprob_items(entries: Sequence[TextLogprob], most: int) -> bytes:
    """JSON of the entries of `prompt_logprobs`: for each token, by id, itself and the `most` likely ones in its place.
    The first has nothing before it, and is null."""

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
    """`rank` among all tokens, 1 for the likeliest; None if it is not among those told."""
    return {"logprob": finite(logprob), "rank": rank, "decoded_token": shown(text)}
