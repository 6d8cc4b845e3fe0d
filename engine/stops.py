"""Decides when a request ends (stop tokens, stop strings, length limits) and what may follow (constraints and
rules)."""

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
from engine.token_rules import TokenRules, both, forbid, permit


class StopCriteria:
    """Judges each accepted token. `eos_token_ids` are the model's own; some checkpoints name more than are in their
    vocabulary. `max_context_len` is in tokens."""

    def __init__(self, eos_token_ids: frozenset[int], max_context_len: int, vocab_size: int) -> None:
        self._eos_token_ids = frozenset(each for each in eos_token_ids if 0 <= each < vocab_size)
        self._vocab_size = vocab_size
        self._num_mask_bytes = -(-vocab_size // 8)
        self._max_context_len = max_context_len

    def begin(self, request: LiveRequest) -> Finish | None:
        """Sets what ends the request, and accepts its resumed tokens, up to one that ends it. Call it once, first."""
        sampling = request.spec.sampling
        if not sampling.ignore_eos:
            request.stop_ids = sampling.stop_token_ids | self._eos_token_ids
        request.rules = TokenRules.of(sampling, self._eos_token_ids, self._vocab_size)
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
            finish = _accepted(spec.constraint, token_id)
        if finish is None and request.num_output >= request.longest_output:
            return Finish(FinishReason.LENGTH)
        return finish

    def allow(self, request: LiveRequest) -> Finish | None:
        """Sets which tokens may be next, for a request that is held to a constraint or rules, or was. If there are none
        the request ends."""
        if not request.is_held:
            request.allow(None)
            return None
        allowed, may_end = None, True
        if request.constrained:
            assert request.spec.constraint is not None
            try:
                allowed, may_end = self._constrained(request, request.spec.constraint)
            except BaseException as error:
                return _failed("constraint", error)
        ruled = _ruled(request)
        if ruled is not None:
            allowed = ruled if allowed is None else both(allowed, ruled)
        request.allow(None if allowed is None else bytes(allowed))
        if allowed is None or any(allowed):
            return None
        if may_end:
            return Finish(FinishReason.STOP)
        return _failed("constraint", ConstraintFailed("no token of the model can go on with the output"))

    def _constrained(self, request: LiveRequest, constraint: TokenConstraint) -> tuple[bytearray, bool]:
        """Which tokens the request's constraint allows, and whether the output may end. Raises whatever the constraint
        does."""
        allowed, may_end = bytearray(constraint.allowed()), constraint.may_end
        if len(allowed) != self._num_mask_bytes:
            raise ValueError(f"its mask has {len(allowed)} bytes, not {self._num_mask_bytes}")
        ends = may_end and not request.spec.sampling.ignore_eos
        (permit if ends else forbid)(allowed, self._eos_token_ids)
        return allowed, may_end


def _ruled(request: LiveRequest) -> bytearray | None:
    """Which tokens the request's rules allow. Rules that no longer apply are removed."""
    rules = request.rules
    if rules is None:
        return None
    if not rules.hold(request.num_output):
        request.rules = None
        return None
    num_latest = min(rules.recent, request.num_output)
    return rules.mask(request.num_output, request.tokens.latest(num_latest))


def _watched(watcher: TextWatcher, token_id: int) -> Finish | None:
    try:
        matched_text = watcher.accept(token_id)
    except BaseException as error:
        return _failed("text watcher", error)
    return None if matched_text is None else Finish(FinishReason.STOP, matched=matched_text)


def _accepted(constraint: TokenConstraint, token_id: int) -> Finish | None:
    try:
        constraint.accept(token_id)
        return Finish(FinishReason.STOP) if constraint.complete else None
    except BaseException as error:
        return _failed("constraint", error)


def _failed(whose: str, error: BaseException) -> Finish:
    """Watchers and constraints belong to the caller: their error ends the request, not the engine. A panic of compiled
    code, in which both work, is no Exception."""
    if not isinstance(error, ConstraintFailed):
        error = StepFailed(f"the {whose} failed: {type(error).__name__}: {error}")
    return Finish(FinishReason.ERROR, error=error)
