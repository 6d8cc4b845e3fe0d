"""Checks a request before it is queued. Refuses what could never run, or would spoil a step for others."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache

from cache.sequence_kv import pages_for
from engine.api import (
    ADAPTER_MARK,
    MAX_ADDITIVE_PENALTY,
    MAX_LOGIT_BIAS,
    MAX_REPETITION_PENALTY,
    MAX_TEMPERATURE,
    MIN_REPETITION_PENALTY,
    ContextLengthExceeded,
    GenerateRequest,
    InvalidRequest,
    LogprobParams,
    RequestTooLarge,
    SamplingParams,
)

MAX_TOP_K = 2**31 - 1
CHECKED_WORDS = 4
"""How many lists of forbidden words are known as good. The choices of a call have the same one, of thousands of ids."""


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What an engine can take. It never changes, so any thread may check against it."""

    vocab_size: int
    max_context_len: int
    page_size: int
    num_pages: int


def check_request(request: GenerateRequest, limits: RequestLimits) -> None:
    """Raises InvalidRequest, ContextLengthExceeded or RequestTooLarge, each with the field at fault.

    Does not read the history: it is committed, and long.
    """
    if not 0 <= request.history_len <= len(request.history):
        raise InvalidRequest("history_len does not fit the history", param="history_len")
    if ADAPTER_MARK in request.namespace.partition("\0")[0]:
        raise InvalidRequest("namespace: it could be taken for an adapter's", param="namespace")
    if not request.new_tokens:
        raise InvalidRequest("a request needs at least one new token", param="input_ids")
    _check_sampling(request.sampling, limits)
    _check_length(request, limits)  # first: there may be millions of ids
    _check_ids(request.new_tokens, limits, "input_ids")
    _check_resumed(request, limits)
    if request.logprobs is not None:
        _check_logprobs(request, request.logprobs)


def _check_ids(token_ids: Collection[int], limits: RequestLimits, param: str) -> None:
    if min(token_ids, default=0) < 0 or max(token_ids, default=0) >= limits.vocab_size:
        raise InvalidRequest(f"token ids must be in 0..{limits.vocab_size - 1}", param=param)


def _check_sampling(sampling: SamplingParams, limits: RequestLimits) -> None:
    """The ranges for which the sampler picks a token of the vocabulary; NaN is in none of them."""
    in_range = {
        "max_new_tokens": sampling.max_new_tokens >= 0,
        "temperature": 0.0 <= sampling.temperature <= MAX_TEMPERATURE,
        "top_p": 0.0 < sampling.top_p <= 1.0,
        "top_k": 0 <= sampling.top_k <= MAX_TOP_K,
        "min_p": 0.0 <= sampling.min_p <= 1.0,
        "frequency_penalty": abs(sampling.frequency_penalty) <= MAX_ADDITIVE_PENALTY,
        "presence_penalty": abs(sampling.presence_penalty) <= MAX_ADDITIVE_PENALTY,
        "repetition_penalty": MIN_REPETITION_PENALTY <= sampling.repetition_penalty <= MAX_REPETITION_PENALTY,
        "min_new_tokens": sampling.min_new_tokens >= 0,
        "bad_words": all(sampling.bad_words),
        "logit_bias": all(abs(bias) <= MAX_LOGIT_BIAS for bias in sampling.logit_bias.values()),
    }
    for name, good in in_range.items():
        if not good:
            raise InvalidRequest(f"{name} is out of its range: {getattr(sampling, name)}", param=name)
    _check_ids(sampling.logit_bias, limits, "logit_bias")
    _check_ids(sampling.stop_token_ids, limits, "stop_token_ids")
    _check_ids(sampling.allowed_token_ids or (), limits, "allowed_token_ids")
    _check_words(sampling.bad_words, limits)


@lru_cache(CHECKED_WORDS)
def _check_words(words: tuple[tuple[int, ...], ...], limits: RequestLimits) -> None:
    for word in words:
        _check_ids(word, limits, "bad_words")


def _check_length(request: GenerateRequest, limits: RequestLimits) -> None:
    """Many clients know a full context by the words of vLLM's message, or of Anthropic's, and then shorten what they
    send: this message has both."""
    if request.prompt_len >= limits.max_context_len:
        raise ContextLengthExceeded(
            f"the prompt is too long: {request.prompt_len} tokens > {limits.max_context_len - 1} maximum "
            f"({request.history_len} of history). This model's maximum context length is "
            f"{limits.max_context_len} tokens, with at least one for the answer",
            param="input_ids",
        )
    longest = min(request.prompt_len + request.sampling.max_new_tokens, limits.max_context_len)
    pages = pages_for(longest, limits.page_size)
    if pages > limits.num_pages:
        raise RequestTooLarge(
            f"{longest} tokens need {pages} KV pages, the whole pool has {limits.num_pages}",
            param="max_new_tokens",
        )


def _check_resumed(request: GenerateRequest, limits: RequestLimits) -> None:
    """Checks that the resumed tokens can be this request's output."""
    num_resumed = len(request.resumed_tokens)
    longest = min(request.sampling.max_new_tokens, limits.max_context_len - request.prompt_len)
    if num_resumed > longest:
        raise InvalidRequest(
            f"{num_resumed} tokens of output cannot be resumed where {longest} are the most",
            param="resumed_tokens",
        )
    _check_ids(request.resumed_tokens, limits, "resumed_tokens")


def _check_logprobs(request: GenerateRequest, logprobs: LogprobParams) -> None:
    if logprobs.top < 0:
        raise InvalidRequest(f"top is out of its range: {logprobs.top}", param="top_logprobs")
    start = logprobs.input_start
    if start is None:
        return
    if not 0 <= start < request.prompt_len:
        raise InvalidRequest(
            f"input log-probabilities from position {start} on: the input has positions 0..{request.prompt_len - 1} "
            f"({request.history_len} of them history)",
            param="logprob_start_len",
        )
