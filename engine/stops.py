"""When does a request end? Stop tokens, stop strings, length limits."""

from __future__ import annotations

from engine.api import Finish, FinishReason, StepFailed
from engine.request import LiveRequest


class StopCriteria:
    """Judges each accepted token. `eos_token_ids` are the model's own; `max_context_len` is in tokens."""

    def __init__(self, eos_token_ids: frozenset[int], max_context_len: int) -> None:
        self._eos_token_ids = eos_token_ids
        self._max_context_len = max_context_len

    @property
    def max_context_len(self) -> int:
        return self._max_context_len

    def resume(self, request: LiveRequest) -> Finish | None:
        """Accepts the request's resumed tokens, up to the one that ends it if there is one. Call it once, first."""
        for token_id in request.spec.resumed_tokens:
            request.accept(token_id)
            finish = self.check(request, token_id)
            if finish is not None:
                return finish
        return None

    def check(self, request: LiveRequest, token_id: int) -> Finish | None:
        """Call once per accepted token, in order, after `request.accept`."""
        spec = request.spec
        # The watcher sees every token, so that its text stays in step even when another rule ends the request.
        try:
            matched_text = spec.watcher.push(token_id) if spec.watcher is not None else None
        except Exception as error:  # the watcher is the caller's: its fault ends this request, not the engine
            failure = StepFailed(f"the text watcher failed: {type(error).__name__}: {error}")
            return Finish(FinishReason.ERROR, message=failure.message, error=failure)
        if token_id in spec.sampling.stop_token_ids:
            return Finish(FinishReason.STOP, matched=token_id)
        if token_id in self._eos_token_ids and not spec.sampling.ignore_eos:
            return Finish(FinishReason.STOP, matched=token_id)
        if matched_text is not None:
            return Finish(FinishReason.STOP, matched=matched_text)
        if request.num_output >= spec.sampling.max_new_tokens or len(request.tokens) >= self._max_context_len:
            return Finish(FinishReason.LENGTH)
        return None
