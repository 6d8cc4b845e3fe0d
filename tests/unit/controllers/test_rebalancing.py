"""Sessions move from busy to idle replicas. The crowding that a move ends pays for it, and the moves come to an end."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from manual_clock import ManualClock

from controllers.rebalancing import AVERAGED_S, MOST_CREDIT_S, MOVE_S, Rebalancing, kv_tokens_at_owner
from controllers.records import LedgerEntry
from controllers.settings import RebalancingSettings

MIN_GAP = 3.0
TOKENS_PER_S = 1000.0
SETTLED_S = 100 * AVERAGED_S
"""After so long under one load, the average equals that load."""
SESSIONS = st.lists(st.integers(0, 3), min_size=1, max_size=20)
"""The first owner of each session. All sessions are always in a turn, so a replica's load is the number of its
sessions."""


class World:
    """Replicas that report to the policy. `owners` has the owner of each session."""

    def __init__(self, owners: list[int], min_gap: float = MIN_GAP) -> None:
        self.clock = ManualClock()
        self.policy = Rebalancing(RebalancingSettings(min_gap, TOKENS_PER_S), self.clock)
        self.owners = [f"r{number}" for number in owners]
        self.names = ["r0", "r1", "r2", "r3"]
        self.beat(0.0)

    @property
    def loads(self) -> Counter[str]:
        return Counter({name: self.owners.count(name) for name in self.names})

    def takers(self, owner: str) -> list[str]:
        return [name for name in self.names if name != owner]

    def beat(self, after_s: float) -> dict[str, bool]:
        """Reports the load of all replicas. Returns which of them are crowded."""
        self.clock.advance(after_s)
        loads = self.loads
        return {name: self.policy.report(name, loads[name], self.takers(name)) for name in self.names}

    def turn_begins(self, session: int, kv_tokens: int) -> bool:
        owner = self.owners[session]
        taker = self.policy.choose(owner, kv_tokens, self.takers(owner))
        if taker is not None:
            self.policy.moved(owner, taker, kv_tokens)
            self.owners[session] = taker
        return taker is not None


def two_replicas(busy: int, idle: int, min_gap: float = MIN_GAP) -> World:
    world = World([0] * busy + [1] * idle, min_gap)
    world.names = ["r0", "r1"]
    return world


@settings(deadline=None)
@given(SESSIONS, st.integers(2, 6), st.randoms(use_true_random=False))
def test_a_move_never_makes_the_other_the_busier_one_and_moves_end(
    owners: list[int], min_gap: int, rng: random.Random
) -> None:
    world = World(owners, min_gap)
    most_moves = sum(load**2 for load in world.loads.values()) // 2
    moves, quiet = 0, False
    while not quiet:
        crowded, quiet = world.beat(SETTLED_S), True
        for session in rng.sample(range(len(owners)), len(owners)):
            before, owner = world.loads, world.owners[session]
            if not world.turn_begins(session, kv_tokens=0):
                continue
            quiet, moves = False, moves + 1
            after, taker = world.loads, world.owners[session]
            assert crowded[owner]
            assert before[owner] - before[taker] >= min_gap
            assert after[taker] <= after[owner]
            assert before[taker] == min(before.values())
            squares = [sum(load**2 for load in loads.values()) for loads in (before, after)]
            assert squares[1] <= squares[0] - 2
    assert moves <= most_moves
    most, least = max(world.loads.values()), min(world.loads.values())
    assert most - least < min_gap or most < 1.5 * least


@settings(max_examples=15, deadline=None)
@given(SESSIONS, st.integers(0, 3000), st.randoms(use_true_random=False))
def test_under_a_load_that_stays_sessions_move_once_and_for_less_than_they_lost(
    owners: list[int], kv_tokens: int, rng: random.Random
) -> None:
    """Heartbeats come every second, averages lag behind, and turns begin at any moment."""
    world = World(owners)
    moves: Counter[int] = Counter()
    lost_s = 0.0
    for second in range(200):
        loads = world.loads
        lost_s += (max(loads.values()) - min(loads.values())) / 2
        for session in range(len(owners)):
            if rng.random() < 0.3 and world.turn_begins(session, kv_tokens):
                moves[session] += 1
                assert second < 150, "it should be even by now"
        world.beat(1.0)
    assert set(moves.values()) <= {1}, "nobody moves to and fro"
    price_s = moves.total() * (MOVE_S + kv_tokens / TOKENS_PER_S)
    assert price_s <= len(world.names) * lost_s
    most, least = max(world.loads.values()), min(world.loads.values())
    assert most - least <= MIN_GAP or most <= 1.5 * least + 1


@pytest.mark.parametrize(("busy", "idle"), [(2, 0), (3, 1), (14, 10), (1, 1)])
def test_who_is_not_clearly_busier_keeps_its_sessions(busy: int, idle: int) -> None:
    world = two_replicas(busy, idle)
    for _ in range(20):
        assert not any(world.beat(SETTLED_S).values())
        assert not world.turn_begins(0, kv_tokens=0)


def test_a_peak_that_passes_moves_nothing() -> None:
    world = two_replicas(0, 0)
    for _ in range(50):
        for turns in (12, 0, 0, 0, 0, 0):
            world.owners = ["r0"] * turns
            assert not world.beat(1.0)["r0"]


def test_a_long_history_waits_until_the_crowding_has_cost_as_much() -> None:
    """One replica has six turns more than the other, so each second three seconds of turns are lost."""
    world = two_replicas(6, 0)
    world.beat(SETTLED_S)
    world.policy.moved("r0", "r1", int((MOST_CREDIT_S - MOVE_S) * TOKENS_PER_S))  # takes all the credit
    world.beat(0.0)
    waited_s = 0
    while not world.turn_begins(0, kv_tokens=20_000):
        assert world.beat(1.0)["r0"]
        waited_s += 1
    assert 7 <= waited_s <= 12


def test_credit_is_lost_when_the_crowding_ends() -> None:
    world = two_replicas(6, 0)
    world.beat(SETTLED_S)
    world.owners = []
    assert not world.beat(SETTLED_S)["r0"]
    world.owners = ["r0"] * 100
    assert world.beat(AVERAGED_S / 20)["r0"]
    assert not world.turn_begins(0, kv_tokens=10_000)


def test_an_idle_newcomer_is_found_at_once() -> None:
    world = two_replicas(8, 8)
    world.beat(SETTLED_S)
    world.names.append("r2")
    world.beat(0.0)
    assert world.beat(1.0) == {"r0": True, "r1": True, "r2": False}
    assert world.turn_begins(0, kv_tokens=100)
    assert world.owners[0] == "r2"


def test_a_load_that_has_just_been_heard_of_is_no_reason_to_move() -> None:
    """A controller that was killed again and again used to move sessions of replicas that were busy for a moment. Three
    of 335 turns computed their history again."""
    world = two_replicas(busy=8, idle=1)
    moved = False
    for _ in range(int(AVERAGED_S)):
        world.beat(1.0)
        moved |= world.turn_begins(0, kv_tokens=0)
    assert not moved
    for _ in range(int(AVERAGED_S)):
        world.beat(1.0)
        moved |= world.turn_begins(0, kv_tokens=0)
    assert moved


def test_nobody_takes_who_does_not_report() -> None:
    world = two_replicas(8, 0)
    world.beat(SETTLED_S)
    assert world.policy.choose("r0", 0, ["unheard of"]) is None
    assert world.policy.choose("unheard of", 0, ["r1"]) is None
    assert world.policy.choose("r0", 0, []) is None
    world.policy.report("r0", 8, [])
    assert world.policy.choose("r0", 0, ["r1"]) is None, "its load is forgotten"


@pytest.mark.parametrize(
    ("changes", "kv_tokens"),
    [
        ({}, 0),
        ({"size_bytes": 1}, 500),
        ({"in_turn": True}, 500),
        ({"reported_s": None}, 500),
        ({"used_since_report": True}, 500),
    ],
)
def test_kv_that_is_gone_anyway_costs_nothing(changes: dict[str, Any], kv_tokens: int) -> None:
    fields: dict[str, Any] = {"reported_s": 20.0, "used_since_report": False, "size_bytes": 0} | changes
    entry = LedgerEntry("s", "", "r0", 1, tokens=500, turns=2, created_s=0.0, last_used_s=0.0, **fields)
    assert kv_tokens_at_owner(entry) == kv_tokens
