"""The kinds of planted faults, and where each is planted."""

from __future__ import annotations

from enum import StrEnum


class FaultKind(StrEnum):
    """What `POST /v1/kedge/debug/faults` plants."""

    LEAK_PAGE = "leak_page"
    DOUBLE_COUNT = "double_count"
    LOSE_SESSION = "lose_session"
    REFUSE_TURNS = "refuse_turns"
    FAIL_TURNS = "fail_turns"
    SLOW_STEPS = "slow_steps"
    STALL_ENGINE = "stall_engine"
    STOP_HEARTBEATS = "stop_heartbeats"
    SLOW_COMMITS = "slow_commits"
    FAIL_COMMITS = "fail_commits"


IN_CONTROLLER = frozenset({FaultKind.SLOW_COMMITS, FaultKind.FAIL_COMMITS})
"""Kinds that are planted in the controller. All others are planted in a replica."""

LONGEST_S = 3600.0
LONGEST_DELAY_S = 60.0
