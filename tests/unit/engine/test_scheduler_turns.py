"""Session turns through the scheduler: cached tokens, aborts at every stage, rewinds, stale KV."""

from __future__ import annotations

import pytest

from engine.api import FinishReason
from tests.unit.engine.driver import Driver, Talk, request, slot_kv

PAGE_SIZES = [1, 4, 16]


@pytest.mark.parametrize("page_size", [1, 16, 256])
def test_cached_tokens_of_a_turn(page_size: int) -> None:
    """Turn N finds the prompt and the completion of turn N-1, except the last token, which was sampled but never
    run."""
    driver = Driver(page_size=page_size, num_pages=4 if page_size == 256 else 256)
    talk = Talk(driver, "s")
    assert talk.turn(range(1, 20), 5).cached == 0
    for number in range(6):
        before = len(talk.history)
        outcome = talk.turn([30 + number, 31], 3 + number)
        assert outcome.cached == before - 1
        assert outcome.last is not None
        assert outcome.last.prompt_tokens == before + 2


def test_a_turn_computes_its_new_tokens_only() -> None:
    driver = Driver(chunk_size=64, max_batch_tokens=64)
    talk = Talk(driver, "s")
    talk.turn(range(1, 40), 4)
    driver.batches.clear()
    talk.turn([50, 51, 52], 4)
    assert driver.tokens_of_steps == [4, 1, 1, 1]


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_abort_before_admission_leaves_the_slot_untouched(page_size: int) -> None:
    driver = Driver(page_size=page_size)
    talk = Talk(driver, "s")
    talk.turn([1, 2, 3], 4)
    kv = slot_kv(driver.cache, "s")
    before = (kv.pages.tolist(), kv.allocated_len, kv.committed_len)
    spec = talk.spec([4, 5], 4)
    driver.add(spec)
    driver.abort(spec.request_id)
    assert driver.outcomes[spec.request_id].reason is FinishReason.ABORT
    assert slot_kv(driver.cache, "s") is kv
    assert (kv.pages.tolist(), kv.allocated_len, kv.committed_len) == before
    assert talk.turn([6], 4).cached == 6


def test_abort_of_a_first_turn_before_admission_leaves_nothing() -> None:
    driver = Driver()
    driver.add(request("r", [1, 2], session_id="s"))
    driver.abort("r")
    assert driver.cache.num_sessions == 0
    driver.assert_empty()


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("steps", [1, 2, 3, 5])
def test_abort_of_a_first_turn_leaves_no_session(page_size: int, steps: int) -> None:
    """20 prompt tokens in chunks of 8: steps 1 and 2 are in mid-prefill, the others in mid-decode."""
    driver = Driver(page_size=page_size)
    talk = Talk(driver, "s")
    spec = talk.spec(range(1, 21), 9)
    driver.add(spec)
    for _ in range(steps):
        driver.step()
    driver.abort(spec.request_id)
    outcome = driver.outcomes[spec.request_id]
    assert outcome.reason is FinishReason.ABORT
    assert len(outcome.token_ids) == max(0, steps - 2)
    assert driver.cache.num_sessions == 0
    talk.turn(range(1, 21), 9)
    driver.cache.release_session("s")
    driver.assert_empty()


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("steps", [1, 2, 3, 5])
def test_abort_of_a_later_turn_stands_at_the_last_commit(page_size: int, steps: int) -> None:
    driver = Driver(page_size=page_size)
    talk = Talk(driver, "s")
    talk.turn(range(1, 10), 4)
    spec = talk.spec(range(30, 50), 9)
    driver.add(spec)
    for _ in range(steps):
        driver.step()
    driver.abort(spec.request_id)
    assert len(talk.history) - 1 <= driver.held("s") <= len(talk.history)
    outcome = talk.turn([60, 61], 5)
    assert outcome.cached >= len(talk.history) - 7 - 1
    driver.cache.release_session("s")
    driver.assert_empty()


def test_abort_of_a_retracted_turn() -> None:
    driver = Driver(num_pages=12, page_size=4)
    talk = Talk(driver, "s")
    talk.turn(range(1, 10), 4)
    driver.add(request("first", range(30, 34), 30, priority=1))
    spec = talk.spec([7, 8], 16)
    driver.add(spec)
    driver.step_until(lambda: driver.counters.retractions > 0)
    driver.abort(spec.request_id)
    driver.run()
    talk.turn([9], 6)


def test_abort_of_an_unknown_request_is_ignored() -> None:
    driver = Driver()
    assert driver.scheduler.abort("nobody") is None


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_rewind_and_continue(page_size: int) -> None:
    driver = Driver(page_size=page_size)
    talk = Talk(driver, "s")
    talk.turn(range(1, 30), 6)
    for keep in (30, 17, 16, 3, 0):
        driver.cache.rewind_session("s", keep)
        driver.check()
        outcome = talk.turn([60 + keep, 71], 5, keep=keep)
        assert outcome.cached >= keep - keep % page_size
        talk.turn([80, 81], 3)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_kv_past_the_history_handed_in_is_never_reused(page_size: int) -> None:
    """The turn finished here, but its commit failed or its owner rewound. The KV past the history is stale."""
    driver = Driver(page_size=page_size)
    talk = Talk(driver, "s")
    talk.turn(range(1, 10), 4)
    driver.generate(talk.spec([40, 41, 42], 6))  # is never committed
    outcome = talk.turn([50, 51, 52, 53, 54, 55, 56, 57, 58, 59, 60], 6)
    assert outcome.cached <= len(talk.history) - 17
    talk.turn([61], 3, keep=5)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_an_aborted_rewind_leaves_the_history_as_it_was(page_size: int) -> None:
    driver = Driver(page_size=page_size)
    talk = Talk(driver, "s")
    talk.turn(range(1, 10), 4)
    spec = talk.spec([40], 6, keep=6)
    driver.add(spec)
    driver.step()
    driver.abort(spec.request_id)
    talk.turn([50], 5)


def test_a_session_rewound_to_nothing_is_as_good_as_new() -> None:
    driver = Driver(page_size=4)
    talk = Talk(driver, "s")
    talk.turn(range(1, 18), 4)
    driver.cache.rewind_session("s", 0)
    assert driver.cache.num_sessions == 0
    outcome = talk.turn(range(1, 18), 4, keep=0)
    assert outcome.cached == 16, "the shared prefix serves it like a new session"


def test_a_moved_session_starts_from_its_log() -> None:
    """A replica that adopts a session knows only its tokens. An equal prompt in the tree is reused."""
    old, new = Driver(), Driver()
    talk = Talk(old, "s")
    talk.turn(range(1, 20), 5)
    talk.driver = new
    assert talk.turn([30, 31], 5).cached == 0
    assert talk.turn([32], 5).cached == len(talk.history) - 6 - 1


def test_abort_of_an_adopted_session_keeps_what_was_rebuilt() -> None:
    driver = Driver(chunk_size=8)
    talk = Talk(driver, "s")
    talk.history = driver.oracle([1], 30)
    spec = talk.spec([5, 6], 4)
    driver.add(spec)
    driver.step()
    driver.step()
    driver.abort(spec.request_id)
    assert driver.held("s") == 16
    assert talk.turn([7], 4).cached == 16


def test_demotion_between_turns_costs_time_not_tokens() -> None:
    driver = Driver(num_pages=10, page_size=4)
    talk = Talk(driver, "s")
    talk.turn(range(1, 16), 4)
    driver.generate(request("big", range(40, 70), 9))
    assert driver.held("s") == 0
    talk.turn([20, 21], 4)


def test_a_waiting_turn_whose_slot_is_demoted_rebuilds_it() -> None:
    driver = Driver(num_pages=12, page_size=4, max_running=1)
    talk = Talk(driver, "s")
    talk.turn(range(1, 16), 4)
    driver.add(request("big", range(40, 76), 9))
    spec = talk.spec([20, 21], 4)
    driver.add(spec)
    driver.run()
    talk.commit(spec, driver.outcomes[spec.request_id])


def test_two_sessions_with_one_prompt_share_it() -> None:
    driver = Driver(page_size=4)
    prompt = list(range(1, 18))
    first, second = Talk(driver, "a"), Talk(driver, "b")
    first.turn(prompt, 4)
    assert second.turn(prompt, 6).cached == 16
    first.turn([30], 4)
    second.turn([31], 4)


def test_namespaces_do_not_share() -> None:
    driver = Driver(page_size=4)
    prompt = list(range(1, 18))
    Talk(driver, "a").turn(prompt, 4, namespace="tenant-a")
    assert Talk(driver, "b").turn(prompt, 4, namespace="tenant-b").cached == 0
    assert Talk(driver, "c").turn(prompt, 4, namespace="tenant-a").cached == 16
