"""SessionAwareCache: KV moves between slot and turn and is never copied. Idle slots always give way."""

from __future__ import annotations

import pytest

from cache.history import History
from cache.journal import Holder
from cache.pages import BooksError, PageCounts
from cache.sequence_kv import pages_for
from cache.session_cache import Room, SessionBorrowed
from tests.unit.cache.books import PAGE_SIZES, Books, joined, tokens_from


def slot_state(books: Books, session_id: str) -> tuple[object, ...]:
    kv = books.slot_kv(session_id)
    return (kv.pages.tolist(), kv.allocated_len, kv.committed_len, kv.protected_len, id(kv.node))


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_the_next_turn_starts_where_the_last_one_ended(page_size: int) -> None:
    books = Books.make(page_size)
    history = tokens_from(0, 2 * page_size + 3)
    kv = books.run_turn("a", history)
    assert books.sessions.held_tokens() == {"a": len(history) - 1}
    longer = tokens_from(0, len(history) + 5)
    match = books.match("a", longer)
    assert (match.from_slot, match.prefix_len) == (True, len(history) - 1)
    assert books.sessions.begin(match, Holder("a", "r")) is kv, "moved, not copied"


def test_a_continuing_session_never_looks_at_its_tokens() -> None:
    books = Books.make(4)
    books.run_turn("a", tokens_from(0, 10))

    def tokens() -> None:
        raise AssertionError("asked for the whole history")

    chain = books.slot_kv("a").chain.prefix(9)
    chain.extend([9])
    history = History((), 10, chain)

    match = books.sessions.match_prefix("a", "", tokens, 12, history)  # type: ignore[arg-type]
    assert match.prefix_len == 9


def test_match_has_no_side_effects() -> None:
    """If admission is refused after a match, the slot has not changed, so the turn can try again."""
    books = Books.make(4)
    history = tokens_from(0, 19)
    books.run_turn("a", history, share=True)
    before = (slot_state(books, "a"), books.accounts())
    for max_len, prefix_len in ((0, 0), (3, 0), (7, 4), (17, 17), (18, 18), (30, 18)):
        match = books.match("a", history, max_len)
        assert match.prefix_len == prefix_len, "of what is shared whole pages only"
        books.sessions.can_begin(match, 1000)
        assert (slot_state(books, "a"), books.accounts()) == before
    books.match("b", history)
    books.match(None, history)
    assert (slot_state(books, "a"), books.accounts()) == before
    assert books.sessions.num_sessions == 1


def test_kv_past_the_history_is_not_matched() -> None:
    """The turn that computed this KV was never committed, or its owner rewound it."""
    books = Books.make(4)
    tokens = tokens_from(0, 20)
    books.run_turn("a", tokens)
    match = books.sessions.match_prefix("a", "", lambda: tokens, 19, History(tokens.tolist(), 7))
    assert match.prefix_len == 7
    kv = books.sessions.begin(match, Holder("a", "r"))
    books.check()
    assert (kv.committed_len, kv.allocated_len, kv.num_pages) == (7, 7, 2)


def test_during_a_turn_the_slot_is_empty_and_says_who_has_it() -> None:
    books = Books.make(4)
    books.run_turn("a", tokens_from(0, 10))
    books.begin("a", tokens_from(0, 12))
    for operation in (
        lambda: books.match("a", tokens_from(0, 12)),
        lambda: books.sessions.rewind_session("a", 2),
        lambda: books.sessions.release_session("a"),
    ):
        with pytest.raises(SessionBorrowed, match="session a is in a turn of request r"):
            operation()
    assert books.sessions.held_tokens() == {}
    books.check()


def test_a_first_turn_has_a_slot_from_its_beginning() -> None:
    books = Books.make(4)
    books.begin("a", tokens_from(0, 12))
    with pytest.raises(SessionBorrowed):
        books.match("a", tokens_from(0, 12))


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_free_tail_frees_only_pages_wholly_past_the_prefix(page_size: int) -> None:
    books = Books.make(page_size)
    kv = books.begin("a", tokens_from(0, 3 * page_size))
    assert (
        books.sessions.extend(kv, 4 * page_size) is Room.READY
    )  # as after a verify step that allocated more than was accepted
    kv.commit(page_size + 1, None)
    books.sessions.finish_turn("a", kv, tokens_from(0, 4 * page_size))
    pages = kv.pages.tolist()
    again = books.begin("a", tokens_from(0, 4 * page_size))
    books.check()
    assert again.pages.tolist() == pages[: pages_for(page_size + 1, page_size)]
    assert (again.committed_len, again.allocated_len) == (page_size + 1, page_size + 1)


def test_free_tail_is_a_no_op_in_the_common_case() -> None:
    books = Books.make(4)
    for length in range(2, 30):
        kv = books.run_turn(f"s{length}", tokens_from(100 * length, length))
        before = (kv.pages.tolist(), kv.allocated_len)
        books.begin(f"s{length}", tokens_from(100 * length, length + 1))
        assert (kv.pages.tolist(), kv.allocated_len) == before
        books.sessions.give_back(kv, f"s{length}", tokens_from(100 * length, length), length)
        books.sessions.release_session(f"s{length}")
    books.assert_empty()


def test_a_turn_that_recomputes_one_token_keeps_its_part_filled_page() -> None:
    books = Books.make(4)
    kv = books.begin("a", tokens_from(0, 7))
    books.fill(kv, 7)
    books.sessions.finish_turn("a", kv, tokens_from(0, 7))  # as with max_new_tokens=0: every token has KV
    again = books.begin("a", tokens_from(0, 7))
    assert (again.committed_len, again.num_pages) == (6, 2)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_trim_overshoot_cuts_every_length_to_the_target(page_size: int) -> None:
    books = Books.make(page_size)
    kv = books.begin("a", tokens_from(0, 10))
    books.fill(kv, 5 * page_size)  # as if drafts past a stop were accepted
    target = 2 * page_size + 1
    books.sessions.finish_turn("a", kv, tokens_from(0, target))
    books.check()
    assert (kv.committed_len, kv.allocated_len) == (target, target)
    assert kv.num_pages == pages_for(target, page_size)
    assert books.accounts().session == kv.num_pages


def test_trim_overshoot_leaves_an_exact_turn_alone() -> None:
    books = Books.make(4)
    kv = books.begin("a", tokens_from(0, 10))
    books.fill(kv, 9)
    pages = kv.pages.tolist()
    books.sessions.finish_turn("a", kv, tokens_from(0, 10))
    assert (kv.pages.tolist(), kv.committed_len, kv.allocated_len) == (pages, 9, 9)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_rollback_keeps_the_committed_history(page_size: int) -> None:
    books = Books.make(page_size)
    history = tokens_from(0, 2 * page_size + 1)
    kv = books.run_turn("a", history)
    pages = kv.pages.tolist()
    turn = books.begin("a", tokens_from(0, 5 * page_size))
    books.fill(turn, 4 * page_size)
    books.sessions.give_back(turn, "a", history, len(history))
    books.check()
    assert books.sessions.held_tokens() == {"a": len(history)}
    assert books.slot_kv("a") is kv
    assert kv.pages.tolist()[: len(pages)] == pages


def test_rollback_of_a_first_turn_leaves_no_slot() -> None:
    books = Books.make(4)
    kv = books.begin("a", tokens_from(0, 10))
    books.fill(kv, 6)
    books.sessions.give_back(kv, "a", tokens_from(0, 10), 0)
    assert books.sessions.num_sessions == 0
    books.assert_empty()


def test_rollback_of_a_first_turn_returns_the_locks_on_its_shared_prompt() -> None:
    books = Books.make(4)
    tokens = tokens_from(0, 18)
    kv = books.begin("a", tokens)
    books.fill(kv, 17)
    books.sessions.cache_unfinished(kv, tokens)
    books.sessions.give_back(kv, "a", tokens_from(0, 10), 0)
    books.check()
    accounts = books.accounts()
    assert (accounts.protected, accounts.cached, books.sessions.num_sessions) == (0, 4, 0)


def test_a_session_never_frees_pages_of_the_tree() -> None:
    books = Books.make(4)
    tokens = tokens_from(0, 18)
    kv = books.run_turn("a", tokens, share=True)
    shared = kv.pages[: kv.protected_len // 4].tolist()
    books.sessions.release_session("a")
    books.check()
    assert not {*shared} & {*books.allocator.free_pages().tolist()}
    assert books.accounts().cached == len(shared)


def test_session_held_pages_are_those_past_the_protected_prefix() -> None:
    books = Books.make(4)
    kv = books.run_turn("a", tokens_from(0, 19), share=True)
    accounts = books.accounts()
    assert accounts.protected == kv.protected_len // 4 == 4
    assert accounts.session == pages_for(kv.allocated_len, 4) - 4


@pytest.mark.parametrize("length", range(20))
def test_rewind_cuts_to_at_most_the_length(length: int) -> None:
    """Cuts go into private pages and into the protected prefix, on and off page borders."""
    books = Books.make(4)
    history = tokens_from(0, 19)
    books.run_turn("a", history, share=True)
    books.sessions.rewind_session("a", length)
    books.check()
    held = books.sessions.held_tokens().get("a", 0)
    assert held <= length
    assert length - held < 4 or length == 19
    branch = joined(history[:length], tokens_from(500, 9))
    books.run_turn("a", branch)
    assert books.sessions.held_tokens() == {"a": len(branch) - 1}
    books.sessions.release_session("a")
    books.assert_empty()


def test_rewind_to_nothing_leaves_no_slot() -> None:
    """An empty slot would keep the session's next turn from the shared prefixes."""
    books = Books.make(4)
    books.run_turn("a", tokens_from(0, 19), share=True)
    books.sessions.rewind_session("a", 0)
    assert books.sessions.num_sessions == 0
    assert books.match("a", tokens_from(0, 19)).prefix_len == 16


def test_rewind_of_an_unknown_session_is_fine() -> None:
    books = Books.make(4)
    books.sessions.rewind_session("nobody", 3)
    books.sessions.release_session("nobody")
    books.assert_empty()


def test_release_frees_a_session_and_a_second_release_is_fine() -> None:
    books = Books.make(4)
    books.run_turn("a", tokens_from(0, 19), share=True)
    books.sessions.release_session("a")
    books.sessions.release_session("a")
    assert books.sessions.num_sessions == 0
    books.assert_empty()


def test_idle_sessions_are_demoted_longest_idle_first() -> None:
    books = Books.make(4, num_pages=12)
    for name, first in (("a", 0), ("b", 100), ("c", 200)):
        books.run_turn(name, tokens_from(first, 16))  # 4 pages each
    books.run_turn("a", tokens_from(0, 16))  # used again
    kv = books.begin(None, tokens_from(300, 8))
    books.fill(kv, 8)
    assert set(books.sessions.held_tokens()) == {"a", "c"}
    assert books.tiers.num_to_log == 1
    books.fill(kv, 32)
    assert set(books.sessions.held_tokens()) == {"a"}


def test_cached_prefixes_go_before_idle_sessions() -> None:
    books = Books.make(4, num_pages=12)
    books.run_turn("a", tokens_from(0, 16))
    books.run_plain(tokens_from(100, 16))
    kv = books.begin(None, tokens_from(200, 30))
    books.fill(kv, 32)
    assert books.sessions.held_tokens() == {"a": 15}
    assert (books.tiers.num_to_log, books.sessions.evicted) == (0, PageCounts(4))


def test_a_demoted_session_s_protected_pages_become_evictable() -> None:
    books = Books.make(4, num_pages=8)
    books.run_turn("a", tokens_from(0, 31), share=True)
    kv = books.begin(None, tokens_from(200, 30))
    books.fill(kv, 32)
    assert books.sessions.num_sessions == 0
    books.prefixes.release(kv)
    books.assert_empty()


def test_running_turns_are_never_demoted() -> None:
    books = Books.make(4, num_pages=8)
    books.run_turn("a", tokens_from(0, 16))
    books.begin("a", tokens_from(0, 18))
    kv = books.begin(None, tokens_from(200, 30))
    books.fill(kv, 16)
    assert books.sessions.extend(kv, 17) is Room.SHORT
    books.check()
    assert books.tiers.num_to_log == 0


def test_extend_that_fails_leaves_the_sequence_as_it_was() -> None:
    books = Books.make(4, num_pages=8)
    holder = books.begin(None, tokens_from(0, 20))
    books.fill(holder, 20)
    kv = books.begin(None, tokens_from(100, 20))
    books.fill(kv, 5)
    before = (kv.pages.tolist(), kv.allocated_len, kv.committed_len)
    assert books.sessions.extend(kv, 13) is Room.SHORT
    books.check()
    assert (kv.pages.tolist(), kv.allocated_len, kv.committed_len) == before


def test_flush_drops_prefixes_nobody_holds() -> None:
    books = Books.make(4)
    books.run_plain(tokens_from(0, 16))
    books.run_turn("a", tokens_from(100, 19), share=True)
    books.sessions.flush()
    books.check()
    accounts = books.accounts()
    assert (accounts.cached, accounts.protected, accounts.session) == (0, 4, 1)
    assert books.match(None, tokens_from(0, 16)).prefix_len == 0


def test_sessions_share_a_first_prompt_and_let_go_of_it_one_by_one() -> None:
    books = Books.make(4)
    system = tokens_from(0, 16)
    for index in range(3):
        books.run_turn(f"s{index}", joined(system, tokens_from(100 * (index + 1), 7)), share=True)
    accounts = books.accounts()
    assert accounts.protected == 4 + 3
    for index in range(3):
        assert books.match(None, joined(system, [1])).prefix_len == 16
        books.sessions.release_session(f"s{index}")
        books.check()
    books.assert_empty()


def test_namespaces_are_apart_for_first_turns() -> None:
    books = Books.make(4)
    books.run_turn("a", tokens_from(0, 19), share=True, namespace="tenant-a")
    assert books.match("b", tokens_from(0, 19), namespace="tenant-b").prefix_len == 0
    assert books.match("b", tokens_from(0, 19), namespace="tenant-a").prefix_len == 16


def test_pages_freed_twice_by_a_session_are_named() -> None:
    books = Books.make(4)
    kv = books.run_turn("a", tokens_from(0, 10))
    page = int(kv.pages[1])
    books.allocator.free(kv.pages[1:2].copy())
    with pytest.raises(BooksError, match=rf"double free of pages \[{page}\]"):
        books.sessions.release_session("a")
