"""Log-probabilities of a prompt's tokens, in vLLM's form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from serving.front.api.answers.logprobs import finite
from serving.front.api.reply_json import list_items, shown
from serving.wire.turns import TextLogprob


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
