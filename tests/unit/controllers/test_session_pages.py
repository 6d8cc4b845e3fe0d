"""The ledger in pages: every session once, in a stable order, whatever comes and goes between two pages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from manual_clock import ManualClock

from controllers.ownership import OwnershipLedger
from controllers.records import SessionRecord
from controllers.session_keys import session_key, tenant_in

NAMES = ["", "s", "t", "s2", "ä", "z/1", "A", "-"]
TENANTS = ["", "acme", "b"]
KEYS = st.sampled_from([session_key(tenant, name) for tenant in TENANTS for name in NAMES if name])


def ledger_of(keys: list[str]) -> OwnershipLedger:
    clock = ManualClock()
    ledger = OwnershipLedger(clock, clock)
    for key in keys:
        ledger.open(SessionRecord(key, tenant_in(key), 1, "a"))
    return ledger


def pages(ledger: OwnershipLedger, tenant: str | None, limit: int) -> list[list[str]]:
    """Reads pages until one is not full."""
    found: list[list[str]] = []
    while not found or len(found[-1]) == limit:
        after = found[-1][-1] if found else None
        found.append([entry.session_id for entry in ledger.page(tenant, after, limit)])
    return found


@given(st.lists(KEYS, unique=True), st.sampled_from([None, *TENANTS, "nobody"]), st.integers(1, 5))
def test_pages_have_every_session_once(keys: list[str], tenant: str | None, limit: int) -> None:
    ledger = ledger_of(keys)
    wanted = [key for key in keys if tenant is None or tenant_in(key) == tenant]
    found = pages(ledger, tenant, limit)
    assert all(len(page) == limit for page in found[:-1])
    listed = [key for page in found for key in page]
    assert listed == sorted(wanted, key=lambda key: (tenant_in(key), key))
    assert listed == [entry.session_id for entry in ledger.page(tenant)]


@given(
    st.lists(KEYS, unique=True), st.lists(KEYS, unique=True), st.lists(KEYS, unique=True), st.integers(1, 4)
)
def test_what_comes_and_goes_between_pages_moves_no_other(
    keys: list[str], come: list[str], go: list[str], limit: int
) -> None:
    """This holds even if the session where the next page begins goes, or its whole tenant."""
    ledger, stayed = ledger_of(keys), set(keys).difference(go)
    listed: list[str] = []
    while page := ledger.page(None, listed[-1] if listed else None, limit):
        listed += [entry.session_id for entry in page]
        if come and come[-1] not in ledger:
            ledger.open(SessionRecord(come[-1], tenant_in(come[-1]), 1, "a"))
        if go:
            ledger.expire(go.pop())
        come = come[:-1]
    assert len(set(listed)) == len(listed)
    assert stayed <= set(listed)


@pytest.mark.parametrize("after", ["", "zzz", "acme zzz", "b", "nobody x", " "])
def test_a_page_may_begin_behind_what_is_not_there(after: str) -> None:
    ledger = ledger_of(["s", "t", "acme s", "b s"])
    listed = [entry.session_id for entry in ledger.page(None, after)]
    assert listed == [
        key for key in ["s", "t", "acme s", "b s"] if (tenant_in(key), key) > (tenant_in(after), after)
    ]
    assert ledger.page("acme", after) in ([], [ledger.get("acme s")])


def test_a_tenants_page_has_nothing_of_others() -> None:
    ledger = ledger_of(["s", "t", "acme s", "b s"])
    for after in (None, "", "s", "acme", "b s", "acme r"):
        assert {entry.tenant for entry in ledger.page("acme", after)} <= {"acme"}
