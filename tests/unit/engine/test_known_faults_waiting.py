"""Newer known faults of other servers' session caches, in turns that wait, leave or overlap. Each test fails if the
code that prevents the fault is taken out.

Each heading names the fault, with the numbers of SGLang's issues and pull requests. The older faults are in
test_known_faults.py and test_known_faults_turns.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from cache.slots import SlotState
from engine.api import FinishReason, LogprobParams, SessionBusy
from tests.unit.engine.driver import Driver, Talk, request, slot_kv
from tests.unit.engine.fault_rig import driver_of

PAGE_SIZES = (1, 4, 16)


def session_of(driver: Driver) -> Talk:
    """A session with a history of 35 tokens."""
    talk = Talk(driver, "s")
    talk.turn(range(1, 30), 6)
    return talk


def assert_goes_on(driver: Driver, talk: Talk) -> None:
    """Checks that the session takes turns as usual and leaves nothing behind."""
    assert not driver.scheduler.in_turn("s")
    assert not driver.cache._slots.is_expected("s")
    talk.turn([60, 61], 5)
    assert talk.turn([62], 3).cached == len(talk.history) - 3 - 2
    driver.cache.release_session("s")
    driver.check()
    while driver.cache.awaits_copies:
        driver.end_copies()
        driver.check()
    driver.assert_empty()


# m. A client leaves and its next turn comes at once. That turn is refused, or gets tokens that were computed for the
# turn before (36475, 36333).


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("same_id", [False, True])
@pytest.mark.parametrize("steps", [0, 1, 2, 4])
def test_a_turn_right_behind_the_abort_of_the_one_before_is_a_turn_like_any_other(
    steps: int, same_id: bool, ahead: bool
) -> None:
    """With `ahead` a step of the aborted turn is still under way. Its result belongs to nobody."""
    driver = Driver(num_pages=128, ahead=ahead)
    talk = session_of(driver)
    for number in range(4):
        left = talk.spec([40, number, *range(1, 12)], 30)
        driver.add(left)
        for _ in range(steps):
            driver.step()
        driver.abort(left.request_id)
        assert driver.outcomes.pop(left.request_id).reason is FinishReason.ABORT
        stays = talk.spec([50 + number], 12)
        stays = replace(stays, request_id=left.request_id if same_id else stays.request_id)
        driver.add(stays)
        driver.run()
        talk.commit(stays, driver.outcomes.pop(stays.request_id))
    assert_goes_on(driver, talk)


# n. A refused overlapping turn clears the mark of the running turn. A third turn is let in, and both write (36503).


@pytest.mark.parametrize("state", ["waiting", "running", "retracted"])
def test_turns_that_overlap_are_refused_for_as_long_as_the_first_one_lasts(state: str) -> None:
    driver = Driver(num_pages=128, max_running=1)
    talk = session_of(driver)
    first = talk.spec([40], 20)
    if state == "waiting":
        driver.add(request("other", [1, 2], 12, priority=1))
    driver.add(first)
    driver.step()
    driver.step()
    if state == "retracted":
        assert driver.scheduler.retract(first.request_id)
    for number in range(4):
        second = replace(talk.spec([50 + number], 3), request_id=f"overlapping {number % 2}")
        driver.add(second)
        finish = driver.outcomes.pop(second.request_id).finish
        assert finish is not None
        assert isinstance(finish.error, SessionBusy)
        driver.abort(second.request_id)  # its client leaves, which ends no turn
        assert driver.scheduler.in_turn("s")
        driver.step()
    driver.run()
    talk.commit(first, driver.outcomes[first.request_id])
    assert_goes_on(driver, talk)


# o. A turn is aborted in the queue, or its session's KV is taken. The session is unusable after that (31765, 31767).
# The same happens if the turn waits because it was retracted (40251).

Taken = Callable[[Driver], None]


def nothing(_driver: Driver) -> None:
    """The turn waits while its KV stays where it is."""


def dropped(driver: Driver) -> None:
    """The session's KV is dropped, so only the session log has the history."""
    driver.cache.release_session("s")


def being_saved(driver: Driver) -> None:
    slot = driver.cache._slots.get("s")
    assert slot is not None
    driver.cache.tiers.demote(slot)


def in_host_memory(driver: Driver) -> None:
    being_saved(driver)
    driver.check()
    driver.end_copies()


def being_loaded(driver: Driver) -> None:
    in_host_memory(driver)
    driver.cache.promote("s")
    slot = driver.cache._slots.get("s")
    assert slot is not None
    assert slot.state is SlotState.LOADING


TAKEN = [nothing, dropped, being_saved, in_host_memory, being_loaded]


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("taken", TAKEN)
@pytest.mark.parametrize("retracted", [False, True])
@pytest.mark.parametrize("aborted", [False, True])
def test_a_turn_that_waits_is_run_or_leaves_no_trace_whatever_becomes_of_its_kv(
    aborted: bool, retracted: bool, taken: Taken, page_size: int
) -> None:
    driver = Driver(
        num_pages=512 // page_size, page_size=page_size, max_running=1, host_pages=256, copies_wait=True
    )
    talk = session_of(driver)
    spec = talk.spec([40, 41], 12)
    driver.add(spec)
    if retracted:
        driver.step()
        driver.step()
        assert driver.scheduler.retract(spec.request_id)
    driver.add(request("other", [1, 2], 9, priority=1))
    driver.step()
    assert (driver.scheduler.num_waiting, driver.scheduler.num_running) == (1, 1)
    taken(driver)
    driver.check()
    if aborted:
        driver.abort(spec.request_id)
        assert driver.outcomes[spec.request_id].reason is FinishReason.ABORT
    driver.run()
    if not aborted:
        talk.commit(spec, driver.outcomes[spec.request_id])
    assert_goes_on(driver, talk)


# p. A retraction moves the point to which the session is rolled back. An abort then leaves half a turn in it (40252).


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("window_len", [None, 8])
@pytest.mark.parametrize("rounds", [1, 3])
def test_an_abort_after_retractions_takes_the_session_back_to_its_last_commit(
    rounds: int, window_len: int | None, page_size: int
) -> None:
    driver = driver_of(page_size, window_len=window_len, num_window_pages=2048)
    talk = session_of(driver)
    held = driver.held("s")
    pages = slot_kv(driver.cache, "s").num_pages
    spec = talk.spec([1 + n % 90 for n in range(3 * page_size + 2)], 60)
    driver.add(spec)
    for _ in range(rounds):
        for _ in range(page_size + 4):
            driver.step()
        assert driver.scheduler.retract(spec.request_id)
        driver.check()
        assert held <= driver.held("s") <= len(talk.history)
        assert slot_kv(driver.cache, "s").num_pages - pages <= (held % page_size == 0)
    driver.step()
    driver.abort(spec.request_id)
    assert held <= driver.held("s") <= len(talk.history), "the session's own, and the KV of its last token"
    assert driver.cache.books.accounts().in_flight == 0
    assert_goes_on(driver, talk)


# q. A turn that ends after its session was closed assigns pages to the session again.


@pytest.mark.parametrize("end", ["abort", "finish"])
@pytest.mark.parametrize("scored", [False, True])
def test_nothing_is_the_session_s_after_it_was_closed_though_a_step_of_its_turn_is_on_its_way(
    scored: bool, end: str
) -> None:
    driver = Driver(num_pages=128, ahead=True, host_pages=32)
    talk = session_of(driver)
    spec = talk.spec([40], 4, logprobs=LogprobParams(input_start=0) if scored else None)
    driver.add(spec)
    driver.add(request("other", [1, 2], 30))
    if end == "abort":
        driver.step()
        driver.step()
        driver.abort(spec.request_id)
    else:
        driver.step_until(lambda: driver.outcomes[spec.request_id].finish is not None)
    assert driver.in_flight is not None
    driver.cache.release_session("s")
    driver.check()
    for _ in range(3):
        driver.step()
        assert driver.cache.held_tokens() == {}
        assert driver.cache.num_sessions == 0
        assert driver.cache.books.accounts().session == 0
    driver.run()
    driver.assert_empty()
