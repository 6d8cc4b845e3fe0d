"""Calls of `strict` functions in an otherwise free answer: the output is constrained from where a call begins to its
end.

Until then the engine only has to show the tokens, so that such a turn runs like any other. After the end of a call the
answer is free again.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.api import ConstraintFailed, TokenConstraint
from serving.grammars.grammar_constraint import CompiledGrammar, GrammarConstraint
from serving.text.tool_calls.call_watch import CallWatch, WatchedOpening


@dataclass(frozen=True, slots=True)
class StrictCalls:
    """What is compiled from a request's functions. With `one_call` an answer ends after the first call."""

    opening: WatchedOpening
    call: CompiledGrammar
    one_call: bool

    @property
    def worn(self) -> bool:
        return self.call.worn


class StrictCallsConstraint:
    """A TokenConstraint for one answer. It `holds` during a call."""

    def __init__(self, calls: StrictCalls) -> None:
        self._calls = calls
        self._watch = CallWatch(calls.opening)
        self._call: TokenConstraint | None = None
        self.complete = False

    def begin_in_thought(self) -> None:
        """The prompt has begun a thought. Call it only before the first token."""
        self._watch = CallWatch(self._calls.opening, in_thought=True)

    @property
    def holds(self) -> bool:
        return self._call is not None

    @property
    def may_end(self) -> bool:
        return self._call is None or self._call.may_end

    def allowed(self) -> bytes:
        assert self._call is not None
        return self._call.allowed()

    def accept(self, token_id: int) -> None:
        if self._call is None:
            opening = self._watch.push(token_id)
            if opening is not None:
                self._begin(opening)
            return
        self._call.accept(token_id)
        if self._call.complete:
            self._call = None
            self._watch.behind_call()
            self.complete = self._calls.one_call

    def _begin(self, opening: list[int]) -> None:
        """The token that completed the opening may contain more, and that may show that there is no call."""
        matcher = self._calls.call.matcher.deep_copy()
        fits = matcher.validate_tokens(opening) == len(opening)
        if fits:
            matcher.consume_tokens(opening)
        if matcher.is_error():
            raise ConstraintFailed(f"a call cannot be followed: {matcher.get_error()}")
        if fits:
            self._call = GrammarConstraint(matcher, self._calls.call)
