"""Batching, limits, priorities and retraction, without a model."""

from __future__ import annotations

import pytest

from engine.api import FinishReason, SessionBusy
from engine.batch import ScheduledBatch
from engine.request import LiveRequest
from engine.settings import SpeculationMethod
from engine.speculative.proposers import NOTHING, Proposal
from tests.unit.engine.driver import Driver, Talk, request
from tests.unit.engine.fault_rig import Listener


def shape(batch: ScheduledBatch | None) -> dict[str, int]:
    """The number of tokens of each request in a step."""
    assert batch is not None
    return {item.request_id: len(item.token_ids) for item in batch.items}


@pytest.mark.parametrize("page_size", [1, 16, 256])
def test_many_requests_finish_exactly(page_size: int) -> None:
    driver = Driver(page_size=page_size, num_pages=4096 // page_size)
    specs = [request(f"r{n}", range(1, 2 + 5 * n), 3 + n) for n in range(12)]
    for spec, outcome in zip(specs, driver.generate(*specs), strict=True):
        assert outcome.token_ids == driver.oracle(spec.new_tokens, spec.sampling.max_new_tokens)
        assert outcome.reason is FinishReason.LENGTH
    driver.assert_empty()


def test_nothing_to_do_is_no_batch() -> None:
    driver = Driver()
    assert driver.step() is None
    assert not driver.scheduler.has_work


def test_a_new_request_joins_those_that_run() -> None:
    driver = Driver()
    driver.add(request("a", [1, 2], 8))
    assert shape(driver.step()) == {"a": 2}
    driver.add(request("b", [3, 4, 5], 2))
    assert shape(driver.step()) == {"a": 1, "b": 3}
    assert shape(driver.step()) == {"a": 1, "b": 1}
    assert driver.outcomes["b"].reason is FinishReason.LENGTH
    assert shape(driver.step()) == {"a": 1}


def test_a_long_prompt_is_chunked_beside_decodes_which_go_first() -> None:
    driver = Driver(chunk_size=8, max_batch_tokens=10)
    driver.add(request("short", [1, 2], 20))
    driver.step()
    driver.add(request("long", range(1, 21), 2))
    shapes = [shape(driver.step()) for _ in range(4)]
    assert shapes == [
        {"short": 1, "long": 8},
        {"short": 1, "long": 8},
        {"short": 1, "long": 4},
        {"short": 1, "long": 1},
    ]
    assert driver.batches[-4].items[0].request_id == "short"
    driver.run()
    assert driver.outcomes["long"].token_ids == driver.oracle(range(1, 21), 2)


def test_only_the_last_chunk_samples_and_others_know_their_next_token() -> None:
    driver = Driver(chunk_size=4)
    driver.generate(request("a", range(10, 19), 1))
    items = [batch.items[0] for batch in driver.batches]
    assert [item.sample is not None for item in items] == [False, False, True]
    assert [item.next_token for item in items] == [14, 18, None]
    assert [item.start for item in items] == [0, 4, 8]


@pytest.mark.parametrize("speculation", ["off", "ngram", "draft"])
def test_no_step_exceeds_its_token_budget(speculation: SpeculationMethod) -> None:
    driver = Driver(chunk_size=8, max_batch_tokens=10, max_running=16, num_pages=256, speculation=speculation)
    driver.generate(*(request(f"r{n}", range(1, 4 + 3 * n), 12) for n in range(14)))
    assert max(driver.tokens_of_steps) == 10, "proposals included"
    assert all(len(item.token_ids) <= 8 for batch in driver.batches for item in batch.items)


def test_more_decodes_than_budget_still_finish() -> None:
    driver = Driver(max_batch_tokens=2, chunk_size=2)
    specs = [request(f"r{n}", [n + 1], 5) for n in range(6)]
    for spec, outcome in zip(specs, driver.generate(*specs), strict=True):
        assert outcome.token_ids == driver.oracle(spec.new_tokens, 5)


class Babbler(Listener):
    """Once it speaks, it proposes as many drafts as it may. They are hardly ever right."""

    speaks = False

    def propose(self, request: LiveRequest, limit: int) -> Proposal:
        guess = 1 + len(request.tokens) % 90
        return Proposal((guess,) * min(7, limit)) if self.speaks else NOTHING


class Oracle(Listener):
    """Proposes four drafts at every chance, all of them right."""

    driver: Driver

    def propose(self, request: LiveRequest, limit: int) -> Proposal:
        known = list(request.tokens.slice(0, len(request.tokens)))
        return Proposal(tuple(self.driver.oracle(known, min(limit, 4))))


@pytest.mark.parametrize("budget", [8, 9, 16])
def test_drafts_never_take_the_token_of_a_decode(budget: int) -> None:
    """Eight requests decode, and a step has room for little more. Each request gets its token in each step."""
    babbler = Babbler()
    driver = Driver(num_pages=256, max_batch_tokens=budget, guesser=babbler)
    specs = [request(f"r{n}", [n + 1, 2, 3], 40) for n in range(8)]
    for spec in specs:
        driver.add(spec)
    driver.step_until(lambda: all(outcome.token_ids for outcome in driver.outcomes.values()))
    babbler.speaks = True
    drafted = 0
    while not any(outcome.finish for outcome in driver.outcomes.values()):
        batch = driver.step()
        assert set(shape(batch)) == {spec.request_id for spec in specs}
        assert batch is not None
        drafted += sum(item.num_drafts for item in batch.items)
    assert bool(drafted) == (budget > 8), "what is left is theirs"
    driver.run()
    for spec in specs:
        assert driver.outcomes[spec.request_id].token_ids == driver.oracle(spec.new_tokens, 40)


def test_drafts_leave_room_for_prompts() -> None:
    """Streams whose drafts were all right took the whole step, and a new request waited for their end."""
    oracle = Oracle()
    driver = Driver(num_pages=400, page_size=4, max_batch_tokens=24, chunk_size=8, guesser=oracle)
    oracle.driver = driver
    streams = [request(f"r{n}", [n + 1, n + 2, n + 3], 200) for n in range(5)]
    for spec in streams:
        driver.add(spec)
    driver.step_until(lambda: all(outcome.token_ids for outcome in driver.outcomes.values()))
    driver.add(request("new", range(1, 40), 4))
    steps = 0
    while not driver.outcomes["new"].token_ids:
        driver.step()
        steps += 1
    assert steps <= 6, "as without drafts"
    assert not driver.outcomes["r0"].finish
    driver.run()
    for spec in streams:
        assert driver.outcomes[spec.request_id].token_ids == driver.oracle(spec.new_tokens, 200)


def test_no_more_than_max_running_run() -> None:
    driver = Driver(max_running=3)
    for n in range(8):
        driver.add(request(f"r{n}", [n + 1], 4))
    while driver.scheduler.has_work:
        assert len(shape(driver.step())) <= 3
    assert len(driver.outcomes) == 8


def test_higher_priority_is_admitted_first_then_earlier_arrival() -> None:
    driver = Driver(max_running=1)
    for name, priority in (("low", 0), ("high", 5), ("low2", 0), ("high2", 5)):
        driver.add(request(name, [1, 2], 1, priority=priority))
    driver.run()
    assert [batch.items[0].request_id for batch in driver.batches] == ["high", "high2", "low", "low2"]


def test_the_last_in_order_is_retracted_and_resumes_exactly() -> None:
    driver = Driver(num_pages=12, page_size=4)
    specs = [
        request("first", range(1, 5), 24),
        request("second", range(11, 15), 24),
        request("urgent", range(21, 25), 24, priority=1),
    ]
    retracted: list[str] = []
    for spec in specs:
        driver.add(spec)
    before: set[str] = set()
    while driver.scheduler.has_work:
        running = set(shape(driver.step()))
        retracted += [name for name in before - running if driver.outcomes[name].finish is None]
        before = running
    assert driver.counters.retractions > 0
    assert "urgent" not in retracted, "the first in order is never retracted"
    for spec in specs:
        assert driver.outcomes[spec.request_id].token_ids == driver.oracle(spec.new_tokens, 24)
    driver.assert_empty()


def test_a_retracted_turn_keeps_its_history_and_resumes_exactly() -> None:
    driver = Driver(num_pages=12, page_size=4, prefix_cache=False)
    talk = Talk(driver, "s")
    talk.turn(range(1, 10), 4)
    driver.add(request("first", range(30, 34), 30, priority=1))
    spec = talk.spec([7, 8], 16)
    driver.add(spec)
    driver.step_until(lambda: driver.counters.retractions > 0)
    driver.run()
    outcome = driver.outcomes[spec.request_id]
    talk.commit(spec, outcome)
    assert outcome.cached == 12, "counted once, at first admission"
    assert driver.outcomes["first"].token_ids == driver.oracle(range(30, 34), 30)


@pytest.mark.parametrize("max_new_tokens", [1, 5])
def test_retraction_in_mid_prefill_resumes_exactly(max_new_tokens: int) -> None:
    driver = Driver(num_pages=16, page_size=2, chunk_size=2, max_batch_tokens=8)
    talk = Talk(driver, "s")
    talk.turn([1, 2, 3], 2)
    driver.add(request("first", [9], 24, priority=1))
    driver.step()
    spec = talk.spec(range(20, 34), max_new_tokens)
    driver.add(spec)
    driver.run()
    talk.commit(spec, driver.outcomes[spec.request_id])
    assert driver.outcomes["first"].token_ids == driver.oracle([9], 24)


def test_a_request_waits_for_pages_without_touching_others() -> None:
    driver = Driver(num_pages=8, page_size=4)
    driver.add(request("a", range(1, 18), 8))
    driver.step()
    driver.add(request("b", range(31, 48), 8))
    driver.step()
    assert driver.scheduler.num_waiting == 1
    driver.run()
    assert driver.counters.retractions == 0
    assert driver.outcomes["b"].token_ids == driver.oracle(range(31, 48), 8)


def test_two_long_prompts_do_not_push_each_other_out() -> None:
    """The first request has pages only for its first chunk, but the pages for the rest of its prompt are reserved."""
    driver = Driver(num_pages=16, page_size=4, chunk_size=4)
    specs = [request("a", range(1, 40), 4), request("b", range(41, 80), 4)]
    for spec, outcome in zip(specs, driver.generate(*specs), strict=True):
        assert outcome.token_ids == driver.oracle(spec.new_tokens, 4)
    assert driver.counters.retractions == 0


def test_a_request_that_fills_the_pool_alone_runs() -> None:
    driver = Driver(num_pages=8, page_size=4)
    talks = [Talk(driver, f"s{n}") for n in range(3)]
    for talk in talks:
        talk.turn([5, 6, 7], 3)
    (outcome,) = driver.generate(request("big", range(1, 25), 8))
    assert outcome.token_ids == driver.oracle(range(1, 25), 8)
    assert driver.cache.tiers.num_to_log > 0


def test_no_request_waits_for_an_idle_session() -> None:
    """The sessions' contexts together are three times the pool. Every turn still runs and rebuilds what was demoted."""
    driver = Driver(num_pages=16, page_size=4)
    talks = [Talk(driver, f"s{n}") for n in range(8)]
    for turn in range(3):
        for number, talk in enumerate(talks):
            talk.turn([1 + number, 2 + turn, 3], 5)
    assert driver.cache.tiers.num_to_log > 0
    assert sum(len(talk.history) for talk in talks) > 2 * 16 * 4
    for talk in talks:
        driver.cache.release_session(talk.session_id)
    driver.assert_empty()


def test_a_second_turn_of_a_session_is_refused() -> None:
    driver = Driver()
    talk = Talk(driver, "s")
    first, second = talk.spec([1, 2], 4), talk.spec([3], 4)
    driver.add(first)
    assert driver.scheduler.in_turn("s")
    driver.add(second)
    refused = driver.outcomes[second.request_id].finish
    assert refused is not None
    assert isinstance(refused.error, SessionBusy)
    driver.run()
    talk.commit(first, driver.outcomes[first.request_id])
    assert not driver.scheduler.in_turn("s")
    talk.turn([4], 4)


def test_fail_ends_only_the_requests_of_the_step() -> None:
    driver = Driver(max_running=1)
    for name in ("a", "b"):
        driver.add(request(name, [1, 2, 3], 4))
    driver.step()
    error = SessionBusy("because")
    driver.fail_launch(error)
    finish = driver.outcomes["a"].finish
    assert finish is not None
    assert finish.error is error
    driver.run()
    assert driver.outcomes["b"].token_ids == driver.oracle([1, 2, 3], 4)
    driver.assert_empty()


def test_abandon_all_answers_waiting_and_running_without_the_books(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(max_running=1)
    for name in ("a", "b", "c"):
        driver.add(request(name, [1, 2, 3], 4))
    driver.step()
    monkeypatch.setattr(driver.cache, "give_back", None)
    deltas = driver.scheduler.abandon_all(SessionBusy("because"))
    assert sorted(delta.request_id for delta in deltas) == ["a", "b", "c"]
    assert not driver.scheduler.has_work
    assert driver.step() is None


def test_the_kv_that_requests_take_and_lack_is_told() -> None:
    """A running request takes its pages. A waiting request lacks all the pages that it will have."""
    driver = Driver(page_size=4, num_pages=8, max_running=1)
    assert driver.scheduler.kv_utilization == 0
    driver.add(request("a", range(1, 9), 4))
    assert driver.scheduler.kv_utilization == 2 / 8, "it waits"
    driver.step()
    assert driver.scheduler.kv_utilization == 2 / 8, "it runs"
    driver.add(request("b", range(1, 30), 2))
    assert driver.scheduler.kv_utilization >= (2 + 8) / 8
    driver.run()
    assert driver.scheduler.kv_utilization == 0


def test_time_in_the_queue_ends_with_the_first_step_and_is_told() -> None:
    driver = Driver(max_running=1)
    driver.add(request("a", [1, 2], 3))
    driver.step()
    driver.add(request("b", [3, 4], 3))
    while driver.scheduler.num_waiting:
        driver.step()
    waiting = driver.scheduler._live["b"]
    assert waiting.queued_s == 2.0, "two more steps of a, whose clock counts steps"
    assert waiting.delta(()).queued_s == 2.0
    driver.step()
    assert waiting.queued_s == 2.0, "it runs"
