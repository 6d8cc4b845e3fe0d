"""When does a request end? Stop tokens, stop strings, length limits, and constraints, which say what may follow."""

from __future__ import annotations

from engine.api import (
    ConstraintFailed,
    Finish,
    FinishReason,
    StepFailed,
    TextWatcher,
    TokenConstraint,
)
from engine.request import LiveRequest


class StopCriteria:
    """Judges each accepted token. `eos_token_ids` are the model's own; `max_context_len` is in tokens."""

    def __init__(self, eos_token_ids: frozenset[int], max_context_len: int, vocab_size: int) -> None:
        self._eos_token_ids = eos_token_ids
        self._num_mask_bytes = -(-vocab_size // 8)
        self._max_context_len = max_context_len

    def begin(self, request: LiveRequest) -> Finish | None:
        """Says what ends the request, and accepts its resumed tokens, up to one that does. Call it once, first."""
        sampling = request.spec.sampling
        if not sampling.ignore_eos:
            request.stop_ids = sampling.stop_token_ids | self._eos_token_ids
        request.longest_output = min(sampling.max_new_tokens, self._max_context_len - request.prompt_len)
        for token_id in request.spec.resumed_tokens:
            request.accept(token_id)
            finish = self.check(request, token_id)
            if finish is not None:
                return finish
        return self.allow(request)

    def check(self, request: LiveRequest, token_id: int) -> Finish | None:
        """Call once per accepted token, in order, after `request.accept`."""
        spec = request.spec
        if token_id in request.stop_ids:
            return Finish(FinishReason.STOP, matched=token_id)
        finish = None if spec.watcher is None else _watched(spec.watcher, token_id)
        if finish is None and spec.constraint is not None:
            finish = _constrained(spec.constraint, token_id)
        if finish is None and request.num_output >= request.longest_output:
            return Finish(FinishReason.LENGTH)
        return finish

    def allow(self, request: LiveRequest) -> Finish | None:
        """Notes what the next token of a constrained request may be; if there is none the request ends."""
        constraint = request.spec.constraint
        if constraint is None:
            return None
        try:
            allowed, may_end = bytearray(constraint.allowed()), constraint.may_end
            if len(allowed) != self._num_mask_bytes:
                raise ValueError(f"its mask has {len(allowed)} bytes, not {self._num_mask_bytes}")
        except Exception as error:
            return _failed("constraint", error)
        for eos_id in self._eos_token_ids:
            _set_bit(allowed, eos_id, may_end and not request.spec.sampling.ignore_eos)
        request.allow(bytes(allowed))
        if any(allowed):
            return None
        if may_end:
            return Finish(FinishReason.STOP)
        return _failed("constraint", ConstraintFailed("no token of the model can go on with the output"))


def _watched(watcher: TextWatcher, token_id: int) -> Finish | None:
    try:
        matched_text = watcher.accept(token_id)
    except Exception as error:
        return _failed("text watcher", error)
    return None if matched_text is None else Finish(FinishReason.STOP, matched=matched_text)


def _constrained(constraint: TokenConstraint, token_id: int) -> Finish | None:
    try:
        constraint.accept(token_id)
        return Finish(FinishReason.STOP) if constraint.complete else None
    except Exception as error:
        return _failed("constraint", error)


def _failed(whose: str, error: Exception) -> Finish:
    """Watchers and constraints are the caller's: their fault ends the request, not the engine."""
    if not isinstance(error, ConstraintFailed):
        error = StepFailed(f"the {whose} failed: {type(error).__name__}: {error}")
    return Finish(FinishReason.ERROR, message=error.message, error=error)


def _set_bit(mask: bytearray, index: int, value: bool) -> None:
    bit = 1 << (index & 7)
    mask[index >> 3] = mask[index >> 3] | bit if value else mask[index >> 3] & ~bit
