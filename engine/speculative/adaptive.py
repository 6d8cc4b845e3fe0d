"""How many tokens to propose: as many as pay for their verification, and none for a while when none do."""

from __future__ import annotations

from dataclasses import dataclass

PRIOR_RATE = 0.6
PRIOR_TRIALS = 2.0
"""The acceptance rate assumed before any trial, and how many trials the assumption weighs."""

MEMORY = 0.93
"""The weight of a trial after one more trial: about the last fourteen count."""

FIRST_PAUSE = 4
LONGEST_PAUSE = 64
"""Tokens without a proposal after a failed probe. A failure doubles the next pause, a success halves it."""


@dataclass(frozen=True, slots=True)
class ProposalCost:
    """A step with k > 0 proposals for each request takes 1 + first + row * k times as long as one without."""

    row: float
    first: float


def best_length(rate: float, cost: ProposalCost, longest: int) -> int:
    """The number k of proposals with the most tokens per unit of time, if each is accepted with probability `rate` once
    those before it are. It maximises (1 + rate + ... + rate^k) / time, and may be 0."""
    best, best_speed, expected, power = 0, 1.0, 1.0, 1.0
    for length in range(1, longest + 1):
        power *= rate
        expected += power
        speed = expected / (1.0 + cost.first + cost.row * length)
        if speed > best_speed:
            best, best_speed = length, speed
    return best


class DraftLength:
    """Running estimate of one kind of proposal's acceptance rate, and the length that follows from it.

    While the estimate says that no length pays, one token is proposed (a probe) whenever a pause is over.
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

    def choose(self, position: int, longest: int, cost: ProposalCost) -> int:
        """How many tokens, at most `longest`, to propose when the sequence is `position` tokens long."""
        length = best_length(self.rate, cost, longest)
        if length > 0:
            return length
        # A rewound sequence is shorter than it was when the pause began.
        self._resume_at = min(self._resume_at, position + self._pause)
        return min(longest, 1) if position >= self._resume_at else 0

    def observe(self, proposed: int, accepted: int, position: int) -> None:
        """Of `proposed` tokens the first `accepted` agreed; the sequence is now `position` tokens long. Tokens after
        the first that did not agree tell nothing."""
        for trial in range(min(accepted + 1, proposed)):
            self._trials = MEMORY * self._trials + 1.0
            self._accepted = MEMORY * self._accepted + (1.0 if trial < accepted else 0.0)
        if accepted > 0:
            self._pause = max(FIRST_PAUSE, self._pause // 2)
        elif proposed > 0:
            self._resume_at = position + self._pause
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
