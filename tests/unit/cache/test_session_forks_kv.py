"""Forks share full pages and copy the page that is partly full. Each session holds its own, and any order of closes
works."""

from __future__ import annotations

from itertools import permutations

import pytest

from cache.sequence_kv import pages_for
from cache.session_cache import SessionBorrowed
from cache.slots import SlotState
from cache.tiers import CopyKind
from tests.unit.cache.books import Books, joined, tokens_from
from tests.unit.engine.driver import Driver, Talk, request, slot_kv

PAGE_SIZES = (1, 4, 16)


def fork(talk: Talk, child_id: str, length: int) -> tuple[Talk, int]:
    """Forks the first `length` tokens of the parent. Returns the child, and how many of these tokens have KV."""
    covered = talk.driver.fork(talk.session_id, child_id, talk.history[:length])
    child = Talk(talk.driver, child_id)
    child.history = talk.history[:length]
    return child, covered


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("share", [False, True])
def test_a_fork_at_any_length(page_size: int, share: bool) -> None:
    driver = Driver(page_size=page_size, num_pages=256, prefix_cache=share)
    parent = Talk(driver, "parent")
    parent.turn(range(1, 30), 8)
    for length in range(len(parent.history) + 1):
        child, covered = fork(parent, f"child{length}", length)
        assert covered == min(length, len(parent.history) - 1)
        assert driver.held(child.session_id) == covered
        before = driver.held("parent")
        outcome = child.turn([50, length], 5)
        assert outcome.cached == covered
        assert driver.held("parent") == before
        if length % 5 == 0:
            parent.turn([60], 2)
        driver.cache.release_session(child.session_id)
    driver.cache.release_session("parent")
    driver.assert_empty()


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_whole_pages_are_shared_and_only_the_part_filled_one_is_copied(page_size: int) -> None:
    books = Books.make(page_size)
    books.run_turn("parent", tokens_from(0, 3 * page_size + 2))
    length = 2 * page_size + page_size // 2
    free = books.accounts().free
    assert books.fork("parent", "child", tokens_from(0, length)) == length
    books.check()
    parent, child = books.slot_kv("parent"), books.slot_kv("child")
    assert child.pages[:2].tolist() == parent.pages[:2].tolist()
    assert books.accounts().free == free - (page_size > 1)
    orders = books.take_orders()
    assert [order.kind for order in orders] == [CopyKind.CLONE] * (page_size > 1)
    for order in orders:
        assert order.pages is not None
        assert order.target is not None
        assert order.pages.full.tolist() == [parent.pages[2]]
        assert order.target.full.tolist() == [child.pages[2]]
        assert parent.pages[2] != child.pages[2]
    assert child.num_pages == pages_for(length, page_size)


@pytest.mark.parametrize("order", list(permutations(["parent", "child", "grandchild", "twin"])))
def test_forks_of_forks_end_in_any_order(order: tuple[str, ...]) -> None:
    driver = Driver(page_size=4)
    parent = Talk(driver, "parent")
    parent.turn(range(1, 12), 4)
    child, _ = fork(parent, "child", 10)
    child.turn([30, 31, 32], 4)
    grandchild, _ = fork(child, "grandchild", 14)
    twin, _ = fork(child, "twin", 14)
    talks = [parent, child, grandchild, twin]
    for number, talk in enumerate(talks):
        talk.turn([40 + number, 41], 5)
    for closed in order:
        driver.cache.release_session(closed)
        driver.check()
        talks = [talk for talk in talks if talk.session_id != closed]
        for talk in talks:
            talk.turn([70], 3)
    driver.assert_empty()


def test_a_parent_s_abort_and_rewind_leave_the_child_alone() -> None:
    driver = Driver(page_size=4)
    parent = Talk(driver, "parent")
    parent.turn(range(1, 12), 8)
    child, _ = fork(parent, "child", 15)
    spec = parent.spec([30], 20)
    driver.add(spec)
    driver.step()
    driver.abort(spec.request_id)
    driver.cache.rewind_session("parent", 3)
    driver.check()
    parent.turn([31], 4, keep=3)
    child.turn([32], 4)
    driver.cache.rewind_session("child", 9)
    child.turn([33], 9, keep=9)
    parent.turn([34], 4)


def test_during_a_turn_of_either_nothing_is_forked() -> None:
    books = Books.make(4)
    books.run_turn("a", tokens_from(0, 10))
    books.run_turn("b", tokens_from(0, 10))
    books.begin("a", tokens_from(0, 12))
    for parent, child in (("a", "c"), ("b", "a")):
        with pytest.raises(SessionBorrowed):
            books.fork(parent, child, tokens_from(0, 8))
    assert books.sessions.held_tokens() == {"b": 9}
    books.check()


def test_a_child_that_had_kv_loses_it_and_an_unknown_parent_gives_none() -> None:
    books = Books.make(4)
    books.run_turn("a", tokens_from(0, 10))
    books.run_turn("b", tokens_from(500, 10))
    assert books.fork("a", "b", tokens_from(0, 8)) == 8
    books.check()
    assert books.fork("nobody", "b", tokens_from(0, 8)) == 0
    assert books.sessions.held_tokens() == {"a": 9}
    assert books.fork("a", "b", tokens_from(0, 0)) == 0
    assert books.sessions.num_sessions == 1
    books.sessions.release_session("a")
    books.assert_empty()


def test_without_a_free_page_the_child_computes_the_part_filled_one() -> None:
    books = Books.make(4, num_pages=3)
    books.run_turn("a", tokens_from(0, 11))
    assert books.fork("a", "b", tokens_from(0, 10)) == 8
    assert books.take_orders() == []


def test_a_parent_in_host_memory_gives_no_kv_and_comes_back_whole() -> None:
    driver = Driver(num_pages=24, page_size=4, host_pages=24)
    parent = Talk(driver, "parent")
    parent.turn(range(1, 12), 8)
    driver.generate(request("big", range(20, 90), 20))
    assert driver.cache.tiers.num_to_host == 1
    child, covered = fork(parent, "child", 15)
    assert (covered, driver.held("parent")) == (0, 18)
    child.turn([30], 4)
    parent.turn([31], 4)
    for name in ("child", "parent"):
        driver.cache.release_session(name)
    driver.assert_empty()


def test_a_fork_of_a_session_that_is_being_saved_ends_the_save() -> None:
    """The fork replaces the parent's duplicates of the tree's pages and frees them. A save that went on would copy what
    others write there."""
    driver = Driver(num_pages=24, page_size=4, host_pages=24, copies_wait=True)
    parent = Talk(driver, "parent")
    parent.turn(range(1, 10), 12)
    driver.generate(request("twin", parent.history, 1))  # the tree now has its own completion pages
    slot = driver.cache._slots.get("parent")
    assert slot is not None
    driver.cache.tiers.demote(slot)
    driver.check()
    assert slot.state is SlotState.SAVING
    child, covered = fork(parent, "child", len(parent.history))
    assert covered == 20
    driver.add(request("other", range(40, 80), 12))
    for _ in range(6):
        driver.step()
    driver.end_copies()
    driver.run()
    driver.check()
    parent.turn([7], 5)
    child.turn([8], 5)
    for name in ("child", "parent"):
        driver.cache.release_session(name)
    driver.assert_empty()


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("window_len", [3, 8, 40])
def test_a_fork_with_a_window_covers_what_the_parent_still_sees(page_size: int, window_len: int) -> None:
    driver = Driver(page_size=page_size, num_pages=256, window_len=window_len, num_window_pages=256)
    parent = Talk(driver, "parent")
    parent.turn(range(1, 30), 8)
    full = len(parent.history) - 1
    for length in (*range(0, full, 3), full, full + 1):
        child, covered = fork(parent, f"child{length}", length)
        assert covered <= min(length, full)
        if length >= full and window_len % page_size == 0:
            assert covered == full, "at the parent's end it is all there"
        assert child.turn([50, length], 12).cached >= covered
        parent.turn([60], 1)
        parent.history = parent.history[:full]
        driver.cache.rewind_session("parent", full)
        driver.check()
        driver.cache.release_session(child.session_id)
    driver.cache.release_session("parent")
    driver.assert_empty()


def test_a_child_of_a_windowed_parent_outlives_it() -> None:
    driver = Driver(page_size=4, window_len=8, num_window_pages=64)
    parent = Talk(driver, "parent")
    parent.turn(range(1, 30), 8)
    child, covered = fork(parent, "child", 35)
    assert covered == 35
    shared = set(slot_kv(driver.cache, "child").window.live().tolist())  # type: ignore[union-attr]
    assert shared & set(slot_kv(driver.cache, "parent").window.live().tolist())  # type: ignore[union-attr]
    driver.cache.release_session("parent")
    driver.check()
    child.turn([40], 30)
    driver.cache.release_session("child")
    driver.assert_empty()


@pytest.mark.parametrize("length", [9, 14, 20])
def test_the_draft_model_s_kv_is_forked_with_it(length: int) -> None:
    driver = Driver(page_size=4, speculation="draft", num_pages=128)
    parent = Talk(driver, "parent")
    parent.turn(range(1, 12), 12)
    child, covered = fork(parent, "child", length)
    assert covered == length
    child.turn([50], 12)
    parent.turn([51], 12)


def test_equal_tokens_elsewhere_are_not_taken_for_the_parent_s() -> None:
    """A fork stays in its parent's namespace, which is the tenant's."""
    books = Books.make(4)
    books.run_turn("a", tokens_from(0, 10), namespace="tenant")
    assert books.fork("a", "b", tokens_from(0, 9)) == 9
    assert books.slot_kv("b").namespace == "tenant"
    assert books.match(None, joined(tokens_from(0, 8), [1]), namespace="other").prefix_len == 0
