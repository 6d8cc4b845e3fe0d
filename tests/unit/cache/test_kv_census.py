"""Whose KV lies where, by namespace and tier. Shared pages are not included."""

from __future__ import annotations

from cache.slots import SlotState
from tests.unit.cache.books import PAGE_BYTES, Books, tokens_from


def bytes_of(books: Books) -> dict[tuple[str, str], int]:
    return books.sessions.kv_bytes(())


def test_it_follows_a_session_to_the_host_and_the_disk() -> None:
    books = Books.make(4, 16, host_pages=16, disk_pages=16)
    books.run_turn("a", tokens_from(0, 15), namespace="anna")
    books.run_turn("b", tokens_from(50, 7), namespace="bert")
    assert bytes_of(books) == {("anna", "device"): 4 * PAGE_BYTES, ("bert", "device"): 2 * PAGE_BYTES}
    books.tiers.demote(books.slot("a"))
    both = bytes_of(books)
    assert both["anna", "device"] == both["anna", "host"] == 4 * PAGE_BYTES, "until the copy is done"
    books.end_copies()
    assert books.slot("a").state is SlotState.STORED
    assert bytes_of(books) == {("anna", "host"): 4 * PAGE_BYTES, ("bert", "device"): 2 * PAGE_BYTES}


def test_a_turns_kv_is_its_tenants() -> None:
    books = Books.make(4, 16)
    books.run_turn("a", tokens_from(0, 15), namespace="anna")
    kv = books.begin("a", tokens_from(0, 20), namespace="anna")
    assert bytes_of(books) == {}
    lent = books.sessions.kv_bytes([kv])
    assert lent == {("anna", "device"): 4 * PAGE_BYTES}
    assert books.sessions.session_ids() == {"a"}
    books.sessions.give_back(kv, "a", tokens_from(0, 20), 14)


def test_shared_pages_are_nobodys() -> None:
    books = Books.make(4, 32)
    books.run_turn("a", tokens_from(0, 17), share=True)
    private = books.slot_kv("a").num_private_pages
    assert private < books.slot_kv("a").num_pages
    assert bytes_of(books) == {("", "device"): private * PAGE_BYTES}
