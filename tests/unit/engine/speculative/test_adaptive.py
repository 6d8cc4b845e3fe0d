"""The number of proposals adapts: many where they are accepted, next to none where they are not."""

from __future__ import annotations

import random

import pytest

from engine.speculative.adaptive import DraftLength, ProposalCost, best_length
from engine.speculative.step_costs import StepCosts

COSTS = StepCosts(second=0.36, row=0.12)
COST = COSTS.of_proposals(streams=1)


def speed(rate: float, cost: ProposalCost, length: int) -> float:
    time = 1.0 + (cost.first + cost.row * length if length else 0.0)
    return sum(rate**power for power in range(length + 1)) / time


@pytest.mark.parametrize("rate", [0.0, 0.2, 0.35, 0.5, 0.7, 0.9, 0.99, 1.0])
@pytest.mark.parametrize("streams", [1, 4, 64])
def test_best_length_is_the_fastest(rate: float, streams: int) -> None:
    cost = COSTS.of_proposals(streams)
    fastest = max(range(9), key=lambda length: (speed(rate, cost, length), -length))
    assert best_length(rate, cost, 8) == fastest


def generate(rate: float, tokens: int, length: DraftLength, seed: int = 1) -> tuple[float, int]:
    """The time for `tokens` tokens, measured in steps of a single token, and how many were proposed. Proposals are
    accepted at `rate`."""
    draw = random.Random(seed)
    position, time, proposed_in_all = 100, 0.0, 0
    while position < 100 + tokens:
        proposed = length.choose(position, 8, COST)
        accepted = 0
        while accepted < proposed and draw.random() < rate:
            accepted += 1
        position += accepted + 1
        time += 1.0 + (COST.first + COST.row * proposed if proposed else 0.0)
        proposed_in_all += proposed
        if proposed:
            length.observe(proposed, accepted, position)
    return time, proposed_in_all


def test_what_is_never_accepted_costs_next_to_nothing() -> None:
    time, proposed = generate(0.0, 300, DraftLength())
    assert time < 1.05 * 300
    assert proposed > 3  # it tries again


@pytest.mark.parametrize(("rate", "gain"), [(0.2, 0.96), (0.6, 1.1), (0.9, 2.0), (1.0, 3.3)])
def test_it_comes_near_the_best_fixed_length(rate: float, gain: float) -> None:
    times = [generate(rate, 2000, DraftLength(), seed)[0] for seed in range(3)]
    reached = 2000 / (sum(times) / 3)
    assert reached > gain
    assert reached > 0.85 * max(speed(rate, COST, length) for length in range(9))


def test_it_learns_anew_when_the_text_changes() -> None:
    length = DraftLength()
    generate(0.0, 500, length)
    slow, _ = generate(0.95, 600, length)
    assert slow < 0.6 * 600
    fast, _ = generate(0.0, 500, length)
    assert fast < 1.05 * 500


def test_a_pause_ends_when_the_sequence_was_rewound() -> None:
    length = DraftLength()
    for position in range(10_000, 10_050):
        length.observe(1, 0, position)
    assert length.choose(10_050, 8, COST) == 0
    waited = next(count for count in range(1000) if length.choose(50 + count, 8, COST))
    assert 0 < waited <= 64
    assert length.choose(50 + waited, 8, COST) == 1
    assert length.choose(50 + waited, 0, COST) == 0


def test_what_follows_a_rejected_token_tells_nothing() -> None:
    one, many = DraftLength(), DraftLength()
    one.observe(3, 2, 10)
    many.observe(8, 2, 10)
    assert one.rate == many.rate
    one.observe(2, 2, 13)
    assert one.rate > many.rate
