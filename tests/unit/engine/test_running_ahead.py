"""Steps planned before the result of the step before is known: what is pending, what waits, what is dropped."""

from __future__ import annotations

from typing import Any

import pytest

from engine.api import FinishReason, LogprobParams, StepFailed
from engine.batch import PENDING, BatchItem, ScheduledBatch
from engine.request import LiveRequest
from engine.speculative.proposers import NOTHING, Proposal
from tests.unit.engine.driver import Driver, Talk, greedy, request, slot_kv
from tests.unit.engine.fault_rig import Guesser


def ahead(**options: Any) -> Driver:
    return Driver(ahead=True, **options)


def step(driver: Driver) -> ScheduledBatch:
    batch = driver.step()
    assert batch is not None
    return batch


def test_the_next_token_is_pending_while_a_step_is_in_flight() -> None:
    driver = ahead()
    driver.add(request("r", [1, 2, 3], 5))
    first, second = step(driver), step(driver)
    assert first.items[0].pending_from is None
    item = second.items[0]
    assert (list(item.token_ids), item.pending_from, item.start) == ([PENDING], 0, 3)
    assert item.sample is not None
    assert item.certain_len == 4
    driver.run()
    assert driver.outcomes["r"].token_ids == driver.oracle([1, 2, 3], 5)
    driver.assert_empty()


def test_pending_tokens_are_found_by_place_in_the_batch_before() -> None:
    driver = ahead(max_batch_tokens=12)
    for name, length in (("a", 3), ("b", 5), ("c", 2)):
        driver.add(request(name, list(range(1, length + 1)), 6))
    driver.run()
    places = {item.pending_from for batch in driver.batches for item in batch.items}
    assert {0, 1, 2} <= places
    for name, length in (("a", 3), ("b", 5), ("c", 2)):
        assert driver.outcomes[name].token_ids == driver.oracle(list(range(1, length + 1)), 6)


def test_a_request_that_must_end_is_not_computed_past_its_length() -> None:
    driver = ahead()
    driver.add(request("r", [1, 2, 3], 4))
    driver.run()
    assert sum(driver.tokens_of_steps) == 3 + 3


def test_the_context_is_never_exceeded() -> None:
    driver = ahead(context_len=10, decode_steps=4)
    driver.add(request("r", [1, 2, 3], 100))
    driver.run()
    outcome = driver.outcomes["r"]
    assert (outcome.reason, len(outcome.token_ids)) == (FinishReason.LENGTH, 7)


def stop_in_the_middle(driver: Driver) -> Any:
    """Parameters of a turn that a stop token ends before its length, and the tokens of that turn."""
    expected = driver.oracle([1, 2, 3, 4], 30)
    place = next(n for n in range(2, 30) if expected[n] not in expected[:n])
    return greedy(30, stop_token_ids=frozenset({expected[place]})), expected[: place + 1]


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("decode_steps", [1, 4])
def test_what_was_computed_past_a_stop_is_dropped(page_size: int, decode_steps: int) -> None:
    driver = ahead(page_size=page_size, num_pages=256 // page_size, decode_steps=decode_steps)
    sampling, expected = stop_in_the_middle(driver)
    talk = Talk(driver, "s")
    outcome = talk.turn([1, 2, 3, 4], 30, sampling=sampling)
    assert outcome.token_ids == expected
    assert sum(driver.tokens_of_steps) > 4 + len(expected) - 1
    kv = slot_kv(driver.cache, "s")
    assert kv.committed_len in (
        4 + len(expected) - 1,
        4 + len(expected),
    )  # the last token came with several steps
    assert kv.num_pages == -(-kv.committed_len // page_size)
    talk.turn([9, 9], 8)


def test_a_turn_begins_while_a_step_past_the_end_of_the_last_is_in_flight() -> None:
    driver = ahead()
    sampling, expected = stop_in_the_middle(driver)
    talk = Talk(driver, "s")
    spec = talk.spec([1, 2, 3, 4], sampling=sampling)
    driver.add(spec)
    driver.step_until(lambda: driver.outcomes[spec.request_id].finish is not None)
    assert driver.in_flight is not None
    talk.commit(spec, driver.outcomes[spec.request_id])
    assert talk.history[4:] == expected
    assert talk.turn([7, 7, 7], 6).cached == len(talk.history) - 6 - 3 - 1
    driver.assert_empty()


def test_a_name_used_again_does_not_get_the_old_result() -> None:
    driver = ahead()
    driver.add(request("r", [1, 2, 3], 20))
    step(driver)
    step(driver)
    driver.abort("r")
    del driver.outcomes["r"]
    driver.add(request("r", [8, 8, 8], 4))
    driver.run()
    assert driver.outcomes["r"].token_ids == driver.oracle([8, 8, 8], 4)
    driver.assert_empty()


def test_a_retracted_request_resumes_exactly_and_its_flying_result_is_dropped() -> None:
    driver = ahead()
    driver.add(request("r", [1, 2, 3], 12))
    for _ in range(4):
        step(driver)
    assert driver.scheduler.retract("r")
    known = len(driver.outcomes["r"].token_ids)
    driver.settle()
    assert len(driver.outcomes["r"].token_ids) == known
    driver.run()
    assert driver.outcomes["r"].token_ids == driver.oracle([1, 2, 3], 12)
    driver.assert_empty()


def test_nobody_is_retracted_while_a_step_is_in_flight() -> None:
    """The step's result may end a request. Only after it is known is a request retracted."""
    driver = ahead(num_pages=6, page_size=2, prefix_cache=False)
    for name in ("a", "b"):
        driver.add(request(name, [1, 2, 3], 7))
    driver.run()
    assert driver.counters.retractions > 0
    for name in ("a", "b"):
        assert driver.outcomes[name].token_ids == driver.oracle([1, 2, 3], 7)
    driver.assert_empty()


@pytest.mark.parametrize(
    "options",
    [
        {"sampling": greedy(6, repetition_penalty=1.2)},
        {"logprobs": LogprobParams(input_start=0)},
    ],
    ids=["penalties", "scores of the input"],
)
def test_requests_that_need_each_token_wait_for_it(options: dict[str, Any]) -> None:
    driver = ahead(chunk_size=2, decode_steps=4)
    driver.add(request("r", [1, 2, 3, 4, 5], 6, **options))
    driver.run()
    pending = [item for batch in driver.batches for item in batch.items if item.pending_from is not None]
    assert all(item.start >= 5 for item in pending) if "logprobs" in options else not pending
    assert {batch.num_steps for batch in driver.batches} == {1}
    assert driver.outcomes["r"].token_ids == driver.oracle([1, 2, 3, 4, 5], 6)


def items_of(driver: Driver, request_id: str) -> list[BatchItem | None]:
    """The request's item in each batch."""
    return [
        next((item for item in batch.items if item.request_id == request_id), None)
        for batch in driver.batches
    ]


def test_text_without_repetitions_runs_ahead_though_repetitions_would_be_drafted() -> None:
    driver = ahead(speculation="ngram", chunk_size=4)
    prompt = list(range(20, 32))
    driver.add(request("r", prompt, 12))
    driver.run()
    first, second, third, *decodes = items_of(driver, "r")
    assert [item.start for item in (first, second, third) if item is not None] == [0, 4, 8]
    assert len(decodes) == 11, "no step was skipped"
    assert all(item is not None and item.pending_from == 0 for item in decodes)
    assert driver.outcomes["r"].token_ids == driver.oracle(prompt, 12)


def test_a_step_with_drafts_is_awaited() -> None:
    driver = ahead(speculation="ngram", vocab=3)
    driver.add(request("r", [1, 2, 1, 2, 1], 24))
    driver.run()
    items = items_of(driver, "r")
    drafted = [place for place, item in enumerate(items) if item is not None and item.num_drafts]
    assert drafted
    assert driver.counters.accepted_draft_tokens > 0
    for place in drafted:
        item = items[place]
        assert item is not None
        assert item.pending_from is None
        following = next((item for item in items[place + 1 :] if item is not None), None)
        assert following is None or following.pending_from is None
    assert driver.outcomes["r"].token_ids == driver.oracle([1, 2, 1, 2, 1], 24)
    driver.assert_empty()


def test_the_last_step_with_drafts_is_awaited_too() -> None:
    """One draft fits before the end. If it is wrong, another step is needed, which its picks alone can begin."""
    driver = ahead(guesser=Guesser(0, 3))
    driver.add(request("r", [1, 2, 3], 7))
    driver.run()
    drafts = [item.num_drafts for item in items_of(driver, "r") if item is not None]
    assert drafts == [0, 3, 3, 3, 2, 1, 0]
    assert all(item.pending_from is None for item in items_of(driver, "r") if item is not None)
    assert driver.outcomes["r"].token_ids == driver.oracle([1, 2, 3], 7)


class OneGuessed(Guesser):
    """Proposes for one request alone."""

    def propose(self, request: LiveRequest, limit: int) -> Proposal:
        return super().propose(request, limit) if self.may_propose(request) else NOTHING

    def may_propose(self, request: LiveRequest) -> bool:
        return request.request_id == "guessed"


def test_a_request_runs_ahead_beside_one_with_drafts() -> None:
    """Its pending token is found in the rows of a step in which the other has several."""
    driver = ahead(guesser=OneGuessed(2, 1))
    driver.add(request("guessed", [1, 2, 3], 24))
    driver.add(request("plain", [4, 5, 6], 24))
    driver.run()
    guessed, plain = items_of(driver, "guessed"), items_of(driver, "plain")
    after = [place + 1 for place, item in enumerate(guessed) if item is not None and item.num_drafts == 3]
    assert len(after) > 4
    assert all(guessed[place] is None for place in after)
    ahead_of = [item for place in after if (item := plain[place]) is not None]
    assert len(ahead_of) == len(after)
    assert all(item.pending_from is not None for item in ahead_of)
    for name, prompt in (("guessed", [1, 2, 3]), ("plain", [4, 5, 6])):
        assert driver.outcomes[name].token_ids == driver.oracle(prompt, 24)
    driver.assert_empty()


def test_a_draft_model_does_not_run_ahead() -> None:
    driver = ahead(speculation="draft", chunk_size=4)
    driver.add(request("r", list(range(20, 32)), 12))
    driver.run()
    assert all(item.pending_from is None for batch in driver.batches for item in batch.items)
    assert driver.outcomes["r"].token_ids == driver.oracle(list(range(20, 32)), 12)


def test_a_failed_step_fails_also_what_was_launched_after_it() -> None:
    driver = ahead()
    driver.add(request("r", [1, 2, 3], 8))
    step(driver)
    flying = driver.in_flight
    assert flying is not None
    after = driver.scheduler.schedule()
    assert after is not None
    (delta,) = driver.scheduler.fail(flying[0], StepFailed("device lost"))
    assert delta.finish is not None
    assert delta.finish.reason is FinishReason.ERROR
    assert driver.scheduler.fail(after, StepFailed("device lost")) == []
    driver.in_flight = None
    driver.assert_empty()


class TestSeveralStepsInOneGo:
    def test_a_decode_alone(self) -> None:
        driver = Driver(decode_steps=4)
        driver.add(request("r", [1, 2, 3], 9))
        driver.run()
        assert [batch.num_steps for batch in driver.batches] == [1, 4, 4]
        assert driver.outcomes["r"].token_ids == driver.oracle([1, 2, 3], 9)
        driver.assert_empty()

    def test_only_when_nobody_waits_and_all_decode(self) -> None:
        driver = Driver(decode_steps=4, max_running=1)
        for name in ("a", "b"):
            driver.add(request(name, [1, 2, 3], 5))
        driver.run()
        for batch in driver.batches:
            if batch.items[0].request_id == "a":
                assert batch.num_steps == 1
        assert driver.batches[-1].num_steps == 4

    @pytest.mark.parametrize(
        "options",
        [
            {"sampling": greedy(6, logit_bias={5: 2.0})},
            {"sampling": greedy(6, presence_penalty=0.5)},
            {"logprobs": LogprobParams(output=True)},
        ],
        ids=["bias", "penalties", "log-probabilities"],
    )
    @pytest.mark.parametrize("runs_ahead", [False, True])
    def test_never_when_a_step_needs_the_host(self, options: dict[str, Any], runs_ahead: bool) -> None:
        """While such a request waits for its result, the steps without it are single steps as well. Otherwise it would
        wait for several steps."""
        driver = Driver(decode_steps=4, ahead=runs_ahead)
        driver.add(request("needs the host", [1, 2, 3], 6, **options))
        driver.add(request("plain", [4, 5, 6], 24))
        driver.step_until(lambda: driver.outcomes["needs the host"].finish is not None)
        flying = 1 if driver.in_flight is not None else 0
        assert {batch.num_steps for batch in driver.batches[: len(driver.batches) - flying]} == {1}
        driver.run()
        assert max(batch.num_steps for batch in driver.batches) > 1
        assert driver.outcomes["plain"].token_ids == driver.oracle([4, 5, 6], 24)

    def test_the_shortest_decides(self) -> None:
        driver = Driver(decode_steps=8)
        driver.add(request("short", [1, 2, 3], 3))
        driver.add(request("long", [1, 2, 3, 4], 9))
        driver.run()
        assert [batch.num_steps for batch in driver.batches] == [1, 2, 6]

    def test_one_by_one_when_pages_run_short(self) -> None:
        """No KV is demoted or evicted for steps that may be in vain."""
        driver = Driver(decode_steps=8, num_pages=3, page_size=4)
        talk = Talk(driver, "idle")
        talk.turn([5], 2)
        driver.add(request("r", [1, 2, 3], 5))
        driver.run()
        assert driver.outcomes["r"].token_ids == driver.oracle([1, 2, 3], 5)
        assert driver.held("idle") == 2

    def test_the_budget_of_a_step_holds(self) -> None:
        driver = Driver(decode_steps=8, max_batch_tokens=6)
        for name in ("a", "b"):
            driver.add(request(name, [1], 9))
        driver.run()
        assert max(driver.tokens_of_steps) <= 6

    def test_a_pending_token_of_several_steps_is_the_last(self) -> None:
        driver = Driver(decode_steps=3, ahead=True)
        driver.add(request("r", [1, 2, 3], 10))
        driver.run()
        starts = [batch.items[0].start for batch in driver.batches]
        assert starts == [0, 3, 6, 9]
        assert driver.outcomes["r"].token_ids == driver.oracle([1, 2, 3], 10)
