from __future__ import annotations

import pytest

from controllers.admission import (
    MAX_RETRY_AFTER_S,
    MIN_RETRY_AFTER_S,
    Admission,
    TurnLimits,
    TurnLoad,
    admit_session,
    admit_turn,
    estimate_wait_s,
)
from controllers.errors import Overloaded

LIMITS = TurnLimits(max_running=4, max_queued=8)


def test_sessions_up_to_the_limit() -> None:
    admit_session(9, 10)
    with pytest.raises(Overloaded) as caught:
        admit_session(10, 10, next_expiry_s=12.0)
    assert caught.value.retry_after_s == 12.0
    with pytest.raises(Overloaded) as caught:
        admit_session(10, 10)
    assert caught.value.retry_after_s == MAX_RETRY_AFTER_S


@pytest.mark.parametrize(
    ("running", "waiting", "expected"),
    [(0, 0, Admission.ACCEPT), (3, 0, Admission.ACCEPT), (4, 0, Admission.QUEUE), (3, 1, Admission.QUEUE)],
)
def test_turns(running: int, waiting: int, expected: Admission) -> None:
    assert admit_turn(TurnLoad(running, waiting, 1.0), LIMITS) is expected


def test_a_full_queue_refuses() -> None:
    with pytest.raises(Overloaded) as caught:
        admit_turn(TurnLoad(4, 8, 3.0), LIMITS)
    assert caught.value.retry_after_s == 3.0


def test_estimates_are_bounded() -> None:
    assert estimate_wait_s(TurnLoad(4, 8, 0.0), 4) == MIN_RETRY_AFTER_S
    assert estimate_wait_s(TurnLoad(4, 800, 10.0), 4) == MAX_RETRY_AFTER_S
    assert estimate_wait_s(TurnLoad(0, 8, 2.0), 0) == 8.0
