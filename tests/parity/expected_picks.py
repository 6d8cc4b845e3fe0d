"""What a request must have said, by the plain meaning of its parameters and the logits of transformers. It shares no
code with the engine's sampler but the random numbers.

Legend: T tokens of a sequence, V vocabulary.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from engine.api import Finish, FinishReason, SamplingParams
from engine.runner.sampler import uniform
from tests.parity.matrix_cell import CONTEXT
from tests.parity.mixed_requests import EOS, Ended, Words

Row = NDArray[np.float64]
TIE = 2e-5
SLACK = 5e-5
"""How far a random number may lie outside its token's part of the distribution, for rounding."""


def check_ended(ended: Ended, logits_TV: Row) -> None:
    """Walks over the output, token by token, to the end that the request must have had."""
    spec, prompt, output = ended.flight.spec, ended.prompt, ended.flight.output
    assert output[: len(spec.resumed_tokens)] == [*spec.resumed_tokens][: len(output)]
    islands = None if ended.islands is None else ended.islands.__class__(**vars(ended.islands))
    words = None if ended.words is None else Words(*ended.words)
    longest = min(spec.sampling.max_new_tokens, CONTEXT - len(prompt))
    stops = spec.sampling.stop_token_ids | (frozenset() if spec.sampling.ignore_eos else EOS)
    for place in range(longest + 1):
        allowed_V = _allowed(spec.sampling, output[:place], len(logits_TV[0]))
        may_end = True
        if islands is not None and islands.holds:
            may_end = islands.may_end
            choices = islands.choices() - EOS
            choices |= EOS if may_end and not spec.sampling.ignore_eos else frozenset()
            allowed_V &= np.isin(np.arange(len(allowed_V)), sorted(choices))
        if not allowed_V.any():
            return _check_end(ended, place, FinishReason.STOP if may_end else FinishReason.ERROR)
        if place == longest:
            return _check_end(ended, place, FinishReason.LENGTH)
        assert place < len(output), "it ended too early"
        token = output[place]
        if place >= len(spec.resumed_tokens):
            row_V = _edited(
                logits_TV[len(prompt) + place - 1], allowed_V, spec.sampling, prompt, output[:place]
            )
            _check_pick(row_V, token, spec.sampling, len(prompt) + place)
        if token in stops:
            return _check_end(ended, place + 1, FinishReason.STOP, token)
        if words is not None and (matched := words.accept(token)) is not None:
            return _check_end(ended, place + 1, FinishReason.STOP, matched)
        if islands is not None:
            islands.accept(token)
            if islands.complete:
                return _check_end(ended, place + 1, FinishReason.STOP)
        if place + 1 == longest:
            return _check_end(ended, place + 1, FinishReason.LENGTH)
    raise AssertionError("unreachable")


def _check_end(ended: Ended, length: int, reason: FinishReason, matched: int | str | None = None) -> None:
    finish: Finish | None = ended.last.finish
    assert finish is not None
    assert (len(ended.flight.output), finish.reason, finish.matched) == (length, reason, matched)
    spec, scored = ended.flight.spec, ended.flight.logprobs
    wanted = spec.logprobs is not None and spec.logprobs.output
    new = ended.flight.output[len(spec.resumed_tokens) :] if wanted else []
    assert [entry.token_id for entry in scored] == new


def _allowed(params: SamplingParams, output: list[int], vocab_size: int) -> NDArray[np.bool_]:
    allowed_V = np.full(vocab_size, params.allowed_token_ids is None)
    allowed_V[[*(params.allowed_token_ids or ())]] = True
    if len(output) < params.min_new_tokens:
        allowed_V[[*params.stop_token_ids, *EOS]] = False
    for *head, last in params.bad_words:
        if len(head) <= len(output) and output[len(output) - len(head) :] == head:
            allowed_V[last] = False
    return allowed_V


def _edited(
    logits_V: Row, allowed_V: NDArray[np.bool_], params: SamplingParams, prompt: list[int], output: list[int]
) -> Row:
    row_V = np.where(allowed_V, logits_V, -np.inf)
    for token in {*prompt, *output}:
        factor = params.repetition_penalty
        row_V[token] = row_V[token] / factor if row_V[token] > 0 else row_V[token] * factor
    for token, count in Counter(output).items():
        row_V[token] -= params.frequency_penalty * count + params.presence_penalty
    for token, bias in params.logit_bias.items():
        row_V[token] += bias
    return row_V


def _check_pick(row_V: Row, token: int, params: SamplingParams, position: int) -> None:
    assert row_V[token] > -np.inf, f"token {token} at {position} is forbidden"
    if params.greedy:
        assert row_V.max() - row_V[token] < TIE, f"token {token} at {position} is not the likeliest"
        return
    point, parts = uniform(params.seed, position), []
    for slack in (-SLACK, 0.0, SLACK):
        probs_V = _cut(row_V, params, slack)
        low, high = probs_V[:token].sum(), probs_V[: token + 1].sum()
        parts.append((low, high))
        if probs_V[token] > 0 and low - SLACK <= point <= high + SLACK:
            return
    raise AssertionError(f"token {token} at {position}: {point} is in none of {parts}")


def _cut(row_V: Row, params: SamplingParams, slack: float) -> Row:
    """The distribution after temperature, top-k, top-p, of which `slack` may be missing or more, and min-p."""
    scaled_V = (row_V - row_V.max()) / params.temperature
    if 0 < params.top_k < len(row_V):
        scaled_V[scaled_V < np.sort(scaled_V)[-params.top_k] - TIE] = -np.inf
    probs_V = np.exp(scaled_V) / np.exp(scaled_V).sum()
    if params.top_p < 1:
        order = np.argsort(-probs_V, kind="stable")
        before_V = probs_V[order].cumsum() - probs_V[order]
        least = probs_V[order][before_V < params.top_p + slack].min()
        probs_V[probs_V < least * (1 - TIE)] = 0
    probs_V[probs_V < params.min_p * probs_V.max() * (1 - TIE)] = 0
    return probs_V / probs_V.sum()
