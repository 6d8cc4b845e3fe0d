"""What a request is told: the TokenDelta that follows from its state."""

from __future__ import annotations

from engine.api import EngineError, Finish, FinishReason, GenerateRequest, TokenDelta, TokenLogprob
from engine.request import LiveRequest


def delta_of(
    request: LiveRequest,
    token_ids: tuple[int, ...],
    logprobs: tuple[TokenLogprob, ...],
    input_logprobs: tuple[TokenLogprob, ...],
    finish: Finish | None = None,
) -> TokenDelta:
    """News of a live request; `finish` makes it the last."""
    return TokenDelta(
        request.request_id,
        token_ids,
        request.prompt_len,
        request.cached_tokens or 0,
        request.num_output,
        logprobs,
        input_logprobs,
        finish,
        request.draft_tokens,
        request.accepted_draft_tokens,
    )


def refusal(spec: GenerateRequest, error: EngineError) -> TokenDelta:
    """The only delta of a request that never went live."""
    finish = Finish(FinishReason.ERROR, message=error.message, error=error)
    return TokenDelta(spec.request_id, (), spec.prompt_len, 0, 0, finish=finish)
