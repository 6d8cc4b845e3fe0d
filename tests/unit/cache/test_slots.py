"""SlotTable: which idle session gives way next."""

from __future__ import annotations

import pytest

from cache.sequence_kv import PageAccount, SequenceKV
from cache.slots import SessionSlot, SlotState, SlotTable
from cache.tiers import StoredKV
from tests.unit.cache.books import no_chain


def table_of(*session_ids: str, state: SlotState = SlotState.IDLE) -> SlotTable:
    table = SlotTable()
    for session_id in session_ids:
        table.put(SessionSlot(session_id, state))
    return table


def victims(table: SlotTable, before: str | None = None) -> list[str]:
    """The order in which the sessions would give way."""
    order = []
    while (slot := table.next_victim(before)) is not None:
        order.append(slot.session_id)
        table.remove(slot.session_id)
    return order


def test_the_longest_idle_goes_first() -> None:
    table = table_of("a", "b", "c")
    table.move(SessionSlot("a", SlotState.IDLE), SlotState.IDLE)
    table.put(SessionSlot("b", SlotState.IDLE))
    assert victims(table) == ["c", "a", "b"]


def expect(table: SlotTable, *session_ids: str) -> None:
    """Tells the table that turns of these sessions wait, in this order."""
    for arrival, session_id in enumerate(session_ids):
        table.expect(session_id, (0, arrival))


def test_expected_sessions_go_last_in_reverse_order_of_arrival() -> None:
    table = table_of("a", "b", "c", "d")
    expect(table, "b", "a", "c")
    assert victims(table) == ["d", "c", "a", "b"]


def test_the_place_in_the_queue_counts_not_when_it_was_told() -> None:
    """A turn with priority or a retracted turn stands before turns whose sessions were expected earlier."""
    table = table_of("a", "b", "c")
    for session_id, place in (("a", (0, 3)), ("b", (-1, 9)), ("c", (0, 1))):
        table.expect(session_id, place)
    assert victims(table) == ["a", "c", "b"]


def test_a_session_spares_those_whose_turns_came_before_its_own() -> None:
    table = table_of("a", "b", "c", "d")
    expect(table, "b", "a", "c")
    assert victims(table, before="a") == ["d", "c"], "neither b, which came first, nor itself"
    assert victims(table, before="b") == ["a"]


def test_who_asks_need_not_hold_anything_itself() -> None:
    table = table_of("a", "b")
    expect(table, "a", "new", "b")
    assert victims(table, before="new") == ["b"]


def test_a_turn_that_waits_no_longer_makes_its_session_like_the_others() -> None:
    table = table_of("a", "b")
    expect(table, "a")
    assert table.is_expected("a")
    table.unexpect("a")
    table.unexpect("nobody")
    assert not table.is_expected("a")
    assert victims(table) == ["a", "b"]


@pytest.mark.parametrize("state", [SlotState.LENT, SlotState.SAVING, SlotState.STORED, SlotState.LOADING])
@pytest.mark.parametrize("expected", [False, True])
def test_only_kv_that_rests_on_the_device_can_give_way(state: SlotState, expected: bool) -> None:
    table = table_of("a", state=state)
    if expected:
        expect(table, "a")
    assert table.next_victim() is None


def test_usable_tokens_are_those_of_the_copy_that_can_be_used() -> None:
    kv = SequenceKV(no_chain(4), PageAccount())
    kv.chain.extend(range(9))
    entry = StoredKV(1, "a", "", kv.chain.prefix(7), 7, 7, 0, 100)
    assert SessionSlot("a", SlotState.LENT, borrower="r").usable_len == 0
    assert SessionSlot("a", SlotState.IDLE, kv).usable_len == 9
    assert SessionSlot("a", SlotState.STORED, entry=entry).usable_len == 7
    assert SessionSlot("a", SlotState.LOADING, kv, entry=entry).usable_len == 7
    entry.chain.cut(3)
    assert SessionSlot("a", SlotState.STORED, entry=entry).usable_len == 3
