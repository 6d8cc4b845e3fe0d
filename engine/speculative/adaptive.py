"""How many tokens to propose: as many as pay for their verification, and none for a while where none do."""

from __future__ import annotations

PRIOR_RATE = 0.6
PRIOR_TRIALS = 2.0
"""What is believed before anything was seen, and how many trials it weighs."""

MEMORY = 0.9
"""What a trial weighs after one more: about the last ten count."""

FIRST_PAUSE = 4
LONGEST_PAUSE = 64
"""Tokens without a proposal after a probe failed; each failure in a row doubles it."""


def best_length(rate: float, row_cost: float, longest: int) -> int:
    """The number k of proposals with the most tokens per unit of time, if each is accepted with probability `rate`
    once those before it are: the maximum of (1 + rate + ... + rate^k) / (1 + row_cost * k), 0 if that is k = 0."""
    best, best_speed, expected, power = 0, 1.0, 1.0, 1.0
    for length in range(1, longest + 1):
        power *= rate
        expected += power
        speed = expected / (1.0 + row_cost * length)
        if speed > best_speed:
            best, best_speed = length, speed
    return best


def effective_row_cost(row_cost: float, streams: int) -> float:
    """What one more token in a step of `streams` requests costs, as a share of what a token of that step costs.

    The step takes 1 - row_cost for itself and row_cost for each row; everybody in it waits for one more row.
    """
    return row_cost * streams / (1.0 - row_cost + row_cost * streams)


class DraftLength:
    """Running estimate of one kind of proposal's acceptance rate, and the length that follows from it.

    While the estimate says that no length pays, one token is proposed (a probe) each time a pause is over.
    """

    __slots__ = ("_accepted", "_pause", "_resume_at", "_trials")

    def __init__(self) -> None:
        self._accepted = PRIOR_RATE * PRIOR_TRIALS
        self._trials = PRIOR_TRIALS
        self._pause = FIRST_PAUSE
        self._resume_at = 0

    @property
    def rate(self) -> float:
        return self._accepted / self._trials

    def choose(self, position: int, longest: int, row_cost: float) -> int:
        """How many tokens, at most `longest`, to propose when the sequence is `position` tokens long."""
        length = best_length(self.rate, row_cost, longest)
        if length > 0:
            return length
        # A rewound sequence is shorter than it was when the pause began.
        self._resume_at = min(self._resume_at, position + self._pause)
        return min(longest, 1) if position >= self._resume_at else 0

    def observe(self, proposed: int, accepted: int, position: int) -> None:
        """Of `proposed` tokens the first `accepted` agreed; the sequence is `position` tokens long now. The ones
        after the first that did not agree tell nothing."""
        for trial in range(min(accepted + 1, proposed)):
            self._trials = MEMORY * self._trials + 1.0
            self._accepted = MEMORY * self._accepted + (1.0 if trial < accepted else 0.0)
        if accepted > 0:
            self._pause = FIRST_PAUSE
        elif proposed > 0:
            self._resume_at = position + self._pause
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
