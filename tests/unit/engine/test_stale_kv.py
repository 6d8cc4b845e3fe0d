"""KV of another history than the turn's, wherever it lies: it is used as far as both agree, to the token."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cache.slots import SlotState
from tests.unit.engine.driver import Driver, Talk, request

PAGE_SIZES = (1, 4, 16)


def at_rest(driver: Driver) -> None:
    """Leaves the KV on the device."""


def being_saved(driver: Driver) -> None:
    slot = driver.cache._slots.get("s")
    assert slot is not None
    driver.cache.tiers.demote(slot)
    driver.check()
    assert slot.state is SlotState.SAVING


def on_the_host(driver: Driver) -> None:
    being_saved(driver)
    driver.end_copies()
    state(driver, SlotState.STORED)


def being_written(driver: Driver) -> None:
    driver.cache.tiers._spare_bytes = driver.cache.tiers.accounts()[0].budget_bytes
    on_the_host(driver)
    driver.check()
    assert driver.runner._disk_copies


def on_disk(driver: Driver) -> None:
    being_written(driver)
    driver.end_disk_copies()
    assert driver.cache.tiers.num_to_disk == 1


def being_loaded(driver: Driver) -> None:
    on_the_host(driver)
    driver.cache.promote("s")
    driver.check()
    state(driver, SlotState.LOADING)


def state(driver: Driver, expected: SlotState) -> None:
    slot = driver.cache._slots.get("s")
    assert slot is not None
    assert slot.state is expected


PLACES = [at_rest, being_saved, on_the_host, being_written, on_disk, being_loaded]


def driver_of(page_size: int) -> Driver:
    """A driver whose copies end when a test says so, or when nothing else can go on."""
    return Driver(page_size=page_size, num_pages=256, host_pages=256, disk_pages=256, copies_wait=True)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("keep", [0, 1, 7, 16, 33])
def test_a_history_that_changed_elsewhere_finds_the_part_that_did_not(
    place: Callable[[Driver], None], page_size: int, keep: int
) -> None:
    driver = driver_of(page_size)
    talk = Talk(driver, "s")
    talk.turn(range(1, 30), 8)
    place(driver)
    talk.history = [*talk.history[:keep], *[60 + n % 30 for n in range(40 - keep)]]
    outcome = talk.turn([50, 51], 5)
    on_device = place in (at_rest, being_saved)
    # The tree owns the full pages of the first prompt, so a cut into them leaves full pages only.
    whole_pages = on_device and keep < 29 // page_size * page_size
    assert outcome.cached == (keep // page_size * page_size if whole_pages else keep)
    assert talk.turn([52], 5).cached == len(talk.history) - 6 - 1
    driver.end_copies(9)
    driver.end_disk_copies(9)
    driver.cache.release_session("s")
    driver.check()
    driver.assert_empty()


@pytest.mark.parametrize("length", [3, 12, 20])
def test_the_tree_is_asked_where_it_may_have_more_than_a_stale_slot(length: int) -> None:
    driver = driver_of(4)
    talk, twin = Talk(driver, "s"), Talk(driver, "twin")
    talk.turn(range(1, 20), 4)
    prompt = [*talk.history[:length], *range(60, 80)]
    twin.turn(prompt, 4)
    talk.history = list(twin.history)
    assert talk.turn([5], 4).cached == len(prompt) // 4 * 4


def test_a_session_of_another_tenant_by_the_same_name_finds_nothing() -> None:
    driver = driver_of(4)
    talk = Talk(driver, "s")
    talk.turn(range(1, 20), 4, namespace="one")
    (outcome,) = driver.generate(
        request(
            "r", [5], history=talk.history, history_len=len(talk.history), session_id="s", namespace="other"
        )
    )
    assert outcome.cached == 0
    assert outcome.token_ids == driver.oracle([*talk.history, 5], 8)


def test_a_chain_of_another_tenant_agrees_with_nothing() -> None:
    driver = driver_of(4)
    talk = Talk(driver, "s")
    talk.turn(range(1, 20), 4)
    chain = driver.cache.empty_chain("other")
    chain.extend(talk.history)
    assert talk.turn([5], 4, history_chain=chain).cached == 16, "what the tree has of the first prompt"


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("keep", [0, 1, 7, 16, 33])
def test_a_fork_of_a_parent_whose_kv_is_stale_shares_what_is_not(page_size: int, keep: int) -> None:
    driver = driver_of(page_size)
    parent, child = Talk(driver, "parent"), Talk(driver, "child")
    parent.turn(range(1, 30), 8)
    parent.history = [*parent.history[:keep], *[60 + n % 30 for n in range(40 - keep)]]
    child.history = parent.history[:38]
    assert driver.fork("parent", "child", parent.history, 38) == keep
    child.turn([50], 5)
    parent.turn([51], 5)
    for talk in (parent, child):
        driver.cache.release_session(talk.session_id)
    driver.assert_empty()


@pytest.mark.parametrize("window_len", [3, 8])
@pytest.mark.parametrize("keep", [5, 33, 36])
def test_windows_of_stale_kv_are_used_only_where_they_are_whole(window_len: int, keep: int) -> None:
    driver = Driver(page_size=4, num_pages=256, window_len=window_len, num_window_pages=256)
    talk = Talk(driver, "s")
    talk.turn(range(1, 30), 8)
    talk.history = [*talk.history[:keep], *range(60, 70)]
    talk.turn([50], 5)
    driver.cache.release_session("s")
    driver.assert_empty()
