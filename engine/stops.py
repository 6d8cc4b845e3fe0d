"""When does a request end? Stop tokens, stop strings, length limits, and constraints, which say what may follow."""

from __future__ import annotations

from engine.api import ConstraintFailed, Finish, FinishReason, StepFailed
from engine.request import LiveRequest


class StopCriteria:
    """Judges each accepted token. `eos_token_ids` are the model's own; `max_context_len` is in tokens."""

    def __init__(self, eos_token_ids: frozenset[int], max_context_len: int, vocab_size: int) -> None:
        self._eos_token_ids = eos_token_ids
        self._num_mask_bytes = -(-vocab_size // 8)
        self._max_context_len = max_context_len

    @property
    def max_context_len(self) -> int:
        return self._max_context_len

    def begin(self, request: LiveRequest) -> Finish | None:
        """Accepts the request's resumed tokens, up to the one that ends it if there is one. Call it once, first."""
        for token_id in request.spec.resumed_tokens:
            request.accept(token_id)
            finish = self.check(request, token_id)
            if finish is not None:
                return finish
        return self.allow(request)

    def check(self, request: LiveRequest, token_id: int) -> Finish | None:
        """Call once per accepted token, in order, after `request.accept`."""
        spec = request.spec
        # The watcher sees every token, so that its text stays in step even when another rule ends the request.
        try:
            matched_text = spec.watcher.push(token_id) if spec.watcher is not None else None
        except Exception as error:
            return _failed("text watcher", error)
        if token_id in spec.sampling.stop_token_ids:
            return Finish(FinishReason.STOP, matched=token_id)
        if token_id in self._eos_token_ids and not spec.sampling.ignore_eos:
            return Finish(FinishReason.STOP, matched=token_id)
        if matched_text is not None:
            return Finish(FinishReason.STOP, matched=matched_text)
        if spec.constraint is not None:
            try:
                spec.constraint.accept(token_id)
                if spec.constraint.complete:
                    return Finish(FinishReason.STOP)
            except Exception as error:
                return _failed("constraint", error)
        if request.num_output >= spec.sampling.max_new_tokens or len(request.tokens) >= self._max_context_len:
            return Finish(FinishReason.LENGTH)
        return None

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
        request.allowed = bytes(allowed)
        if any(allowed):
            return None
        if may_end:
            return Finish(FinishReason.STOP)
        return _failed("constraint", ConstraintFailed("no token of the model can go on with the output"))


def _failed(whose: str, error: Exception) -> Finish:
    """Watchers and constraints are the caller's: their fault ends the request, not the engine."""
    if not isinstance(error, ConstraintFailed):
        error = StepFailed(f"the {whose} failed: {type(error).__name__}: {error}")
    return Finish(FinishReason.ERROR, message=error.message, error=error)


def _set_bit(mask: bytearray, index: int, value: bool) -> None:
    bit = 1 << (index & 7)
    mask[index >> 3] = mask[index >> 3] | bit if value else mask[index >> 3] & ~bit
