"""What a compiled grammar allows next, as a constraint for the engine, and its errors in words for a client."""

from __future__ import annotations

import re

from llguidance import LLMatcher

from engine.api import ConstraintFailed

MAX_REASON_CHARS = 200


class GrammarConstraint:
    """A TokenConstraint."""

    def __init__(self, matcher: LLMatcher, end_id: int, num_mask_bytes: int) -> None:
        self._matcher = matcher
        self._end_id = end_id
        self._num_mask_bytes = num_mask_bytes

    @property
    def holds(self) -> bool:
        return True

    @property
    def may_end(self) -> bool:
        return self._matcher.is_accepting()

    @property
    def complete(self) -> bool:
        return self._matcher.is_stopped()

    def allowed(self) -> bytes:
        mask = bytearray(self._matcher.compute_bitmask())
        self._check()
        mask[self._end_id >> 3] &= ~(1 << (self._end_id & 7))
        # The model may have more tokens than the tokenizer.
        return bytes(mask[: self._num_mask_bytes]).ljust(self._num_mask_bytes, b"\0")

    def accept(self, token_id: int) -> None:
        self._matcher.consume_token(token_id)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise ConstraintFailed(f"the output cannot be followed: {reason_of(self._matcher.get_error())}")


def reason_of(problem: str) -> str:
    """llguidance's message, without the position in the grammar."""
    problem = re.sub(r"^at \d+\(\d+\): (failed to compile JSON schema: )?", "", problem)
    lines = [line.strip() for line in problem.splitlines()]
    named = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (named or lines)[0][:MAX_REASON_CHARS]
