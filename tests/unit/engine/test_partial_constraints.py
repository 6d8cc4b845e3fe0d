"""Constraints that hold parts of an output. Free parts run as if there were no constraint, held parts are held
exactly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from engine.api import FinishReason, GenerateRequest, SamplingParams, StepFailed
from engine.request import LiveRequest
from engine.speculative.ngram_proposer import NgramProposer
from engine.speculative.proposers import Proposal
from tests.unit.engine.driver import Driver, Talk, greedy, request
from tests.unit.engine.ladder import Ladder
from tests.unit.engine.null_runner import nearest_allowed

PROMPT = [5, 6, 7, 5, 6, 7, 5, 6, 7]
RUNGS = [3, 1, 5, 2, 4]
LENGTH = 60


class Islands:
    """A TokenConstraint that holds the tokens after each of `openers` to a Ladder, and no other tokens."""

    def __init__(self, openers: Sequence[int], rungs: Sequence[int] = RUNGS) -> None:
        self._openers = frozenset(openers)
        self._rungs = rungs
        self._ladder: Ladder | None = None
        self.num_islands = 0

    @property
    def holds(self) -> bool:
        return self._ladder is not None

    @property
    def may_end(self) -> bool:
        return False

    @property
    def complete(self) -> bool:
        return False

    def allowed(self) -> bytes:
        assert self._ladder is not None
        return self._ladder.allowed()

    def accept(self, token_id: int) -> None:
        if self._ladder is not None:
            self._ladder.accept(token_id)
            self._ladder = None if self._ladder.complete else self._ladder
        elif token_id in self._openers:
            self._ladder = Ladder(self._rungs)
            self.num_islands += 1


def by_hand(
    driver: Driver, prompt: Sequence[int], constraint: Islands, params: SamplingParams, count: int = LENGTH
) -> list[int]:
    """The expected tokens: one by one the model's own pick, or the allowed token in its place."""
    out: list[int] = []
    while len(out) < count:
        (own,) = driver.oracle([*prompt, *out], 1, params)
        out.append(nearest_allowed(own, constraint.allowed()) if constraint.holds else own)
        constraint.accept(out[-1])
    return out


class Oracle(NgramProposer):
    """Proposes drafts at every chance: the tokens that the model would pick if it were free."""

    driver: Driver

    def propose(self, request: LiveRequest, limit: int) -> Proposal:
        known = list(request.tokens.slice(0, len(request.tokens)))
        return Proposal(tuple(self.driver.oracle(known, min(limit, 4), request.spec.sampling)))


MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "ahead": {"ahead": True},
    "ahead by four": {"ahead": True, "decode_steps": 4},
    "four at once": {"decode_steps": 4},
    "pages of one": {"ahead": True, "decode_steps": 4, "page_size": 1, "num_pages": 256},
    "windows": {"ahead": True, "decode_steps": 3, "window_len": 8, "num_window_pages": 40},
    "draft model": {"speculation": "draft"},
    "windows and drafts": {"speculation": "draft", "window_len": 8, "num_window_pages": 40},
    "right guesses": {"guesser": True},
}


def made(mode: str, **options: Any) -> Driver:
    options = {**MODES[mode], **options}
    if not options.pop("guesser", False):
        return Driver(**options)
    guesser = Oracle(2, 4, 0.0)
    guesser.driver = Driver(**options, guesser=guesser)
    return guesser.driver


@pytest.fixture(params=MODES)
def driver(request: pytest.FixtureRequest) -> Driver:
    return made(request.param)


PARAMS = [greedy(LENGTH), SamplingParams(max_new_tokens=LENGTH, seed=4)]


def openers(driver: Driver, params: SamplingParams, *places: int) -> list[int]:
    """The tokens that are said at these places and at no earlier place."""
    said = driver.oracle(PROMPT, LENGTH, params)
    return [next(token for token in said[place:] if token not in said[:place]) for place in places]


def partly(name: str, constraint: Islands, params: SamplingParams, **options: Any) -> GenerateRequest:
    return request(name, PROMPT, constraint=constraint, sampling=params, **options)


@pytest.mark.parametrize("params", PARAMS, ids=["greedy", "sampled"])
@pytest.mark.parametrize("place", range(8))
def test_from_its_opener_on_it_is_held(driver: Driver, params: SamplingParams, place: int) -> None:
    """The opener may be picked at any place in a step. What that step picked after it is dropped."""
    opener = openers(driver, params, place)
    constraint = Islands(opener)
    held, free = driver.generate(partly("held", constraint, params), request("free", [9, 8], 40))
    assert held.token_ids == by_hand(driver, PROMPT, Islands(opener), params)
    assert constraint.num_islands
    assert held.token_ids != driver.oracle(PROMPT, LENGTH, params)
    assert free.token_ids == driver.oracle([9, 8], 40)
    driver.assert_empty()


@pytest.mark.parametrize("params", PARAMS, ids=["greedy", "sampled"])
def test_often_held_and_often_free(driver: Driver, params: SamplingParams) -> None:
    many = range(1, 97, 4)
    constraint = Islands(many, [2, 3])
    (outcome,) = driver.generate(partly("a", constraint, params))
    assert outcome.token_ids == by_hand(driver, PROMPT, Islands(many, [2, 3]), params)
    assert constraint.num_islands > 3
    driver.assert_empty()


@pytest.mark.parametrize("params", PARAMS, ids=["greedy", "sampled"])
@pytest.mark.parametrize("mode", MODES)
def test_without_an_opener_each_step_is_as_without_a_constraint(mode: str, params: SamplingParams) -> None:
    """With steps planned ahead, several at once and with drafts, the batches are the same, not just the tokens."""
    bare, watched = made(mode), made(mode)
    plain = bare.generate(request("a", PROMPT, sampling=params), request("b", [1, 2], 20))
    never = Islands([])
    told = watched.generate(partly("a", never, params), request("b", [1, 2], 20))
    assert [outcome.token_ids for outcome in told] == [outcome.token_ids for outcome in plain]
    assert told[0].last is not None
    assert plain[0].last is not None
    assert told[0].last.draft_tokens == plain[0].last.draft_tokens
    shape = [
        [
            (batch.num_steps, i.request_id, i.start, list(i.token_ids), i.pending_from, i.num_drafts)
            for i in batch.items
        ]
        for batch in bare.batches
    ]
    assert shape == [
        [
            (batch.num_steps, i.request_id, i.start, list(i.token_ids), i.pending_from, i.num_drafts)
            for i in batch.items
        ]
        for batch in watched.batches
    ]


def test_it_is_planned_ahead_again_behind_what_was_held() -> None:
    driver = Driver(ahead=True, decode_steps=4)
    params = greedy(LENGTH)
    (outcome,) = driver.generate(partly("a", Islands(openers(driver, params, 2), [1, 1]), params))
    assert len(outcome.token_ids) == LENGTH
    masked = [
        place for place, b in enumerate(driver.batches) if b.items[0].sample and b.items[0].sample.allowed
    ]
    assert masked
    behind = driver.batches[masked[-1] + 1 :]
    assert any(batch.num_steps == 4 for batch in behind)
    assert any(batch.items[0].pending_from is not None for batch in behind)


@pytest.mark.parametrize("known", range(0, 24, 3))
def test_resumed_it_goes_on_the_same(driver: Driver, known: int) -> None:
    params = PARAMS[1]
    opener = openers(driver, params, 3)
    whole = by_hand(driver, PROMPT, Islands(opener), params)
    (outcome,) = driver.generate(partly("a", Islands(opener), params, resumed_tokens=whole[:known]))
    assert outcome.token_ids == whole


@pytest.mark.parametrize("after", [2, 5, 7, 12])
def test_retracted_it_goes_on_the_same(driver: Driver, after: int) -> None:
    params = PARAMS[1]
    opener = openers(driver, params, 3)
    driver.add(partly("a", Islands(opener), params))
    driver.step_until(lambda: len(driver.outcomes["a"].token_ids) >= after)
    assert driver.scheduler.retract("a")
    driver.settle()
    driver.run()
    assert driver.outcomes["a"].token_ids == by_hand(driver, PROMPT, Islands(opener), params)
    driver.assert_empty()


def test_short_of_pages_all_say_the_same() -> None:
    driver = Driver(num_pages=26, ahead=True, decode_steps=4)
    many = range(1, 97, 4)
    outcomes = driver.generate(*[partly(f"r{n}", Islands(many, [2, 3]), greedy(LENGTH)) for n in range(4)])
    assert driver.counters.retractions
    expected = by_hand(driver, PROMPT, Islands(many, [2, 3]), greedy(LENGTH))
    assert [outcome.token_ids for outcome in outcomes] == [expected] * 4


def test_its_turn_leaves_the_session_its_kv(driver: Driver) -> None:
    talk = Talk(driver, "s")
    talk.turn([1, 2, 3, 4, 5], 6)
    many = range(1, 97, 4)
    spec = talk.spec([9, 9], 21, constraint=Islands(many, [2, 3]))
    (outcome,) = driver.generate(spec)
    prompt = [*talk.history, 9, 9]
    assert outcome.token_ids == by_hand(driver, prompt, Islands(many, [2, 3]), greedy(21), 21)
    talk.history = prompt + outcome.token_ids
    known = len(talk.history)
    assert talk.turn([3, 1], 5).cached >= known - 1
    driver.assert_empty()


def test_an_abort_where_what_was_picked_was_taken_back() -> None:
    driver = Driver(ahead=True, decode_steps=4)
    params = greedy(LENGTH)
    driver.add(partly("a", Islands(openers(driver, params, 2)), params))
    driver.step_until(lambda: any(b.items[0].sample and b.items[0].sample.allowed for b in driver.batches))
    driver.abort("a")
    assert driver.outcomes["a"].reason is FinishReason.ABORT
    driver.run()
    driver.assert_empty()


def test_a_step_that_fails_and_was_not_looked_at_fails_nobody() -> None:
    """The step was already under way when the opener before it was read."""
    driver = Driver(ahead=True)
    params = greedy(LENGTH)
    constraint = Islands(openers(driver, params, 2))
    driver.add(partly("a", constraint, params))
    driver.step_until(lambda: constraint.holds)
    driver.step(StepFailed("lost"))
    driver.run()
    assert driver.outcomes["a"].token_ids == by_hand(
        driver, PROMPT, Islands(openers(driver, params, 2)), params
    )
    driver.assert_empty()
