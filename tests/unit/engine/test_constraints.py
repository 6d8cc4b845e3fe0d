"""A constrained request says only what its constraint allows. Other requests do not notice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from engine.api import ConstraintFailed, FinishReason, GenerateRequest, SamplingParams, StepFailed
from engine.request import LiveRequest
from engine.speculative.ngram_proposer import NgramProposer
from engine.speculative.proposers import Proposal
from tests.unit.engine.driver import VOCAB, Driver, Panic, Talk, greedy, request
from tests.unit.engine.ladder import Ladder, mask
from tests.unit.engine.null_runner import EOS_TOKEN_ID, nearest_allowed

PROMPT = [5, 6, 7, 5, 6, 7, 5, 6, 7]


def by_hand(
    driver: Driver, prompt: Sequence[int], constraint: Ladder, params: SamplingParams | None = None
) -> list[int]:
    """The expected tokens: one by one the model's own pick, or the allowed token in its place."""
    out: list[int] = []
    while not constraint.complete:
        (own,) = driver.oracle([*prompt, *out], 1, params)
        out.append(nearest_allowed(own, constraint.allowed()))
        constraint.accept(out[-1])
    return out


def constrained(
    name: str, constraint: Ladder, prompt: Sequence[int] = PROMPT, **options: Any
) -> GenerateRequest:
    options.setdefault("max_new_tokens", 40)
    return request(name, prompt, constraint=constraint, **options)


@pytest.fixture(params=[(False, 1), (True, 1), (True, 4)], ids=["plain", "ahead", "ahead by four"])
def driver(request: pytest.FixtureRequest) -> Driver:
    ahead, decode_steps = request.param
    return Driver(ahead=ahead, decode_steps=decode_steps)


RUNGS = [3, 1, 5, 2, 9, 4, 1, 1, 8, 3]


@pytest.mark.parametrize("seed", [None, 4], ids=["greedy", "sampled"])
def test_each_token_is_the_pick_among_those_allowed(driver: Driver, seed: int | None) -> None:
    params = greedy(40) if seed is None else SamplingParams(max_new_tokens=40, seed=seed)
    (outcome,) = driver.generate(constrained("a", Ladder(RUNGS), sampling=params))
    assert outcome.token_ids == by_hand(driver, PROMPT, Ladder(RUNGS), params)
    assert outcome.finish is not None
    assert (outcome.finish.reason, outcome.finish.matched) == (FinishReason.STOP, None)


@pytest.mark.parametrize("eos_token_id", [-1, VOCAB + 8])
def test_an_end_token_outside_the_vocabulary_breaks_no_constraint(eos_token_id: int) -> None:
    """Every constrained request of such a checkpoint used to fail."""
    driver = Driver(eos_token_ids=frozenset({0, eos_token_id}))
    (outcome,) = driver.generate(constrained("a", Ladder(RUNGS)))
    assert outcome.token_ids == by_hand(driver, PROMPT, Ladder(RUNGS))


def test_neighbours_say_what_they_would_say_alone(driver: Driver) -> None:
    outcomes = driver.generate(
        request("free", [9, 8, 7], 30),
        constrained("held", Ladder(RUNGS)),
        request("late", [4, 4], 20),
    )
    assert outcomes[0].token_ids == driver.oracle([9, 8, 7], 30)
    assert outcomes[1].token_ids == by_hand(driver, PROMPT, Ladder(RUNGS))
    assert outcomes[2].token_ids == driver.oracle([4, 4], 20)
    driver.assert_empty()


def test_the_length_cuts_it_off(driver: Driver) -> None:
    (outcome,) = driver.generate(constrained("a", Ladder(RUNGS), max_new_tokens=4))
    assert outcome.token_ids == by_hand(driver, PROMPT, Ladder(RUNGS))[:4]
    assert outcome.reason is FinishReason.LENGTH


@pytest.mark.parametrize("decode_steps", [1, 4])
@pytest.mark.parametrize("ahead", [False, True])
def test_the_end_is_allowed_where_the_output_is_whole(ahead: bool, decode_steps: int) -> None:
    """The model wants to end at once, but may not before the fourth token."""
    driver = Driver(eos_probability=1.0, ahead=ahead, decode_steps=decode_steps)
    (outcome,) = driver.generate(constrained("a", Ladder([6], may_end_at=4, endless=True)))
    assert len(outcome.token_ids) == 5
    assert EOS_TOKEN_ID not in outcome.token_ids[:4]
    assert outcome.finish is not None
    assert (outcome.finish.reason, outcome.finish.matched) == (FinishReason.STOP, EOS_TOKEN_ID)


def test_who_ignores_the_end_token_is_not_offered_it() -> None:
    driver = Driver(eos_probability=1.0)
    params = greedy(12, ignore_eos=True)
    endless = Ladder([6], may_end_at=0, endless=True)
    (outcome,) = driver.generate(constrained("a", endless, sampling=params))
    assert EOS_TOKEN_ID not in outcome.token_ids
    assert (outcome.reason, len(outcome.token_ids)) == (FinishReason.LENGTH, 12)


def test_an_end_that_nothing_spells_is_still_an_end() -> None:
    """Nothing may follow and the output is whole, but the model has no token for the end."""
    driver = Driver(eos_token_ids=frozenset())
    (outcome,) = driver.generate(constrained("a", Ladder([2, 2, 0], may_end_at=2)))
    assert (outcome.reason, len(outcome.token_ids)) == (FinishReason.STOP, 2)


def test_no_way_on_is_an_error_of_that_request(driver: Driver) -> None:
    lost, other = driver.generate(constrained("a", Ladder([2, 2, 0])), request("b", [1, 2], 20))
    assert lost.finish is not None
    assert isinstance(lost.finish.error, ConstraintFailed)
    assert other.token_ids == driver.oracle([1, 2], 20)
    driver.assert_empty()


@pytest.mark.parametrize("error", [ConstraintFailed("too deep"), ZeroDivisionError("bug"), Panic("bug")])
@pytest.mark.parametrize("when", [1, 3])
def test_a_fault_of_the_constraint_ends_its_request_alone(
    driver: Driver, error: BaseException, when: int
) -> None:
    faulty = Ladder(RUNGS)
    faulty.fault = (when, error)
    lost, other = driver.generate(constrained("a", faulty), request("b", [1, 2], 20))
    assert lost.finish is not None
    wanted = ConstraintFailed if isinstance(error, ConstraintFailed) else StepFailed
    assert isinstance(lost.finish.error, wanted)
    assert other.token_ids == driver.oracle([1, 2], 20)
    driver.assert_empty()


def test_a_fault_before_the_first_token_is_an_answer(driver: Driver) -> None:
    (outcome,) = driver.generate(constrained("a", Ladder([0, 1])))
    assert outcome.finish is not None
    assert isinstance(outcome.finish.error, ConstraintFailed)
    driver.assert_empty()


@pytest.mark.parametrize("num_bytes", [0, 1, -1])
def test_a_mask_of_another_width_ends_its_request_alone(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, num_bytes: int
) -> None:
    """The masks of a step go to the device in one piece."""
    narrow = Ladder(RUNGS)
    wrong = mask([1, 2])
    wrong = wrong[:num_bytes] if num_bytes >= 0 else wrong + bytes(1)
    monkeypatch.setattr(narrow, "allowed", lambda: wrong)
    lost, held = driver.generate(constrained("a", narrow), constrained("b", Ladder(RUNGS)))
    assert lost.finish is not None
    assert isinstance(lost.finish.error, StepFailed)
    assert f"its mask has {len(wrong)} bytes, not {len(mask([1]))}" in lost.finish.error.message
    assert held.token_ids == by_hand(driver, PROMPT, Ladder(RUNGS))
    driver.assert_empty()


class Guesser(NgramProposer):
    """Proposes drafts at every chance."""

    def propose(self, request: LiveRequest, limit: int) -> Proposal:  # noqa: ARG002
        return Proposal((11, 12)[:limit])


@pytest.mark.parametrize("method", ["draft", "guesser"])
def test_nothing_is_drafted_for_it_alone(method: str) -> None:
    driver = Driver(speculation="draft") if method == "draft" else Driver(guesser=Guesser(2, 4, 0.0))
    free, held = driver.generate(request("free", PROMPT, 30), constrained("held", Ladder(RUNGS)))
    assert free.token_ids == driver.oracle(PROMPT, 30)
    assert held.token_ids == by_hand(driver, PROMPT, Ladder(RUNGS))
    assert free.last is not None
    assert free.last.draft_tokens > 0
    assert held.last is not None
    assert held.last.draft_tokens == 0


def test_it_is_not_planned_ahead_nor_in_several_steps() -> None:
    driver = Driver(ahead=True, decode_steps=4)
    driver.generate(constrained("held", Ladder(RUNGS)), request("free", [1, 2], 40))
    held = [batch for batch in driver.batches if any(i.request_id == "held" for i in batch.items)]
    assert len(held) == len(PROMPT) // 8 + len(RUNGS)
    assert all(batch.num_steps == 1 for batch in held)
    assert all(i.pending_from is None for b in held for i in b.items if i.request_id == "held")
    assert any(batch.num_steps > 1 for batch in driver.batches)


@pytest.mark.parametrize("after", [1, 4, 9])
def test_retracted_it_goes_on_where_it_was(driver: Driver, after: int) -> None:
    constraint = Ladder(RUNGS)
    driver.add(constrained("a", constraint))
    driver.step_until(lambda: len(constraint.accepted) >= after)
    driver.settle()
    assert driver.scheduler.retract("a")
    driver.run()
    assert driver.outcomes["a"].token_ids == by_hand(driver, PROMPT, Ladder(RUNGS))


def test_short_of_pages_all_of_them_still_say_what_they_may() -> None:
    driver = Driver(num_pages=14)
    outcomes = driver.generate(*[constrained(f"r{index}", Ladder([7] * 24)) for index in range(4)])
    assert driver.counters.retractions
    expected = by_hand(driver, PROMPT, Ladder([7] * 24))
    assert [outcome.token_ids for outcome in outcomes] == [expected] * 4


@pytest.mark.parametrize("known", [1, 5, 10])
def test_resumed_tokens_go_through_it(driver: Driver, known: int) -> None:
    whole = by_hand(driver, PROMPT, Ladder(RUNGS))
    constraint = Ladder(RUNGS)
    (outcome,) = driver.generate(constrained("a", constraint, resumed_tokens=whole[:known]))
    assert outcome.token_ids == whole == constraint.accepted
    assert outcome.reason is FinishReason.STOP


def test_resumed_tokens_that_do_not_fit_end_it(driver: Driver) -> None:
    class Strict(Ladder):
        def accept(self, token_id: int) -> None:
            if token_id not in self.choices():
                raise ConstraintFailed("not allowed")

    (outcome,) = driver.generate(constrained("a", Strict(RUNGS), resumed_tokens=[VOCAB - 1]))
    assert outcome.finish is not None
    assert isinstance(outcome.finish.error, ConstraintFailed)


def test_in_a_session_it_is_a_turn_like_any_other(driver: Driver) -> None:
    talk = Talk(driver, "s")
    talk.turn([1, 2, 3, 4, 5], 6)
    spec = talk.spec([9, 9], 40, constraint=Ladder(RUNGS))
    (outcome,) = driver.generate(spec)
    prompt = [*talk.history, 9, 9]
    assert outcome.token_ids == by_hand(driver, prompt, Ladder(RUNGS))
    talk.history = prompt + outcome.token_ids
    known = len(talk.history)
    following = talk.turn([3, 1], 5)
    assert following.cached == known - 1
    aborted = talk.spec([2], 40, constraint=Ladder([3] * 30))
    driver.add(aborted)
    driver.step_until(lambda: bool(driver.outcomes[aborted.request_id].token_ids))
    driver.settle()
    driver.abort(aborted.request_id)
    talk.turn([8], 5)


def test_with_penalties_only_what_is_allowed(driver: Driver) -> None:
    params = replace(greedy(40), frequency_penalty=1.0, logit_bias={3: 50.0})
    (outcome,) = driver.generate(constrained("a", Ladder(RUNGS), sampling=params))
    assert outcome.token_ids == by_hand(driver, PROMPT, Ladder(RUNGS), params)
