"""What a compiled grammar allows next, as a constraint for the engine, and its errors in words for a client."""

from __future__ import annotations

import re
import time

from llguidance import LLMatcher

from engine.api import ConstraintFailed

MAX_REASON_CHARS = 200

FIRST_S = 2.0
EACH_TOKEN_S = 0.002
"""What the masks of a grammar may cost, in CPU time: so much in all, and so much more for each token. Usual grammars
cost 0.03 to 0.7 ms a token with a vocabulary of 128,000 tokens."""


class CompiledGrammar:
    """Owned by the keeper of grammars. Each answer gets a copy of `matcher`, which matches nothing itself.

    Copies share a lexer, which keeps every state that it has come to. A state takes 100 to 250 bytes for each token of
    the grammar that is still possible there, and computing it takes time. So a bound on the time bounds the memory, and
    what a client's grammar may take of the engine's thread. llguidance bounds the number of states alone.
    """

    def __init__(self, matcher: LLMatcher, end_id: int, num_mask_bytes: int) -> None:
        self.matcher = matcher
        self.end_id = end_id
        self.num_mask_bytes = num_mask_bytes
        self._spent_s = 0.0
        self._num_masks = 0

    @property
    def worn(self) -> bool:
        """Whether it has cost so much that it should be compiled anew, with an empty lexer."""
        return self._spent_s > FIRST_S

    def spend(self, seconds: float) -> None:
        """Counts the cost of a mask of one of the copies. Raises ConstraintFailed if all masks have cost too much."""
        self._spent_s += seconds
        self._num_masks += 1
        if self._spent_s > FIRST_S + EACH_TOKEN_S * self._num_masks:
            raise ConstraintFailed(
                f"the output cannot be followed: that takes more than {EACH_TOKEN_S * 1e3:g} ms a token"
            )


class GrammarConstraint:
    """A TokenConstraint. `matcher` is a copy of the grammar's."""

    def __init__(self, matcher: LLMatcher, grammar: CompiledGrammar) -> None:
        self._matcher = matcher
        self._grammar = grammar

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
        end_id, num_bytes = self._grammar.end_id, self._grammar.num_mask_bytes
        started_s = time.thread_time()
        mask = bytearray(self._matcher.compute_bitmask())
        self._check()
        self._grammar.spend(time.thread_time() - started_s)
        mask[end_id >> 3] &= ~(1 << (end_id & 7))
        # The model may have more tokens than the tokenizer.
        return bytes(mask[:num_bytes]).ljust(num_bytes, b"\0")

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
