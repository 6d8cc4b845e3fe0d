"""Tier: the bytes of its budget, and which entries it may drop."""

from __future__ import annotations

import numpy as np

from cache.audit import TierAccounts
from cache.tiers import PoolPages, StoredKV, Tier, TierSizes
from tests.unit.cache.books import no_chain


def entry(key: int, num_bytes: int, *, copies: int = 0) -> StoredKV:
    return StoredKV(key, f"s{key}", "", no_chain(4), 10, 10, 0, num_bytes, copies=copies)


def pages(full: int, window: int = 0) -> PoolPages:
    return PoolPages(np.arange(full, dtype=np.int32), np.arange(window, dtype=np.int32))


def test_sizes_count_the_pages_of_both_pools() -> None:
    sizes = TierSizes(page_bytes=100, window_page_bytes=7)
    assert sizes.size_bytes(pages(3)) == 300
    assert sizes.size_bytes(pages(3, 2)) == 314


def test_the_budget_is_counted_to_the_byte() -> None:
    tier = Tier("host", 100)
    tier.add(entry(1, 60))
    assert [tier.missing_bytes(num_bytes) for num_bytes in (40, 41, 101)] == [0, 1, 61]
    tier.add(entry(2, 40, copies=1))
    assert tier.accounts() == TierAccounts(100, 100, 2)
    assert [known.key for known in tier.settled()] == [1], "a copy works on the other"
    tier.remove(1)
    assert tier.accounts() == TierAccounts(100, 40, 1)
    assert tier.mismatches() == []


def test_without_a_budget_nothing_fits() -> None:
    assert Tier("host").missing_bytes(1) == 1


def test_a_recount_finds_what_is_wrong() -> None:
    tier = Tier("disk", 100)
    tier.add(entry(1, 60))
    tier._entries[1].num_bytes = 50
    assert tier.mismatches() == ["disk: 60 bytes by counter, 50 by walk"]
    tier._entries[1].num_bytes = 60
    tier.add(entry(2, 60))
    assert tier.mismatches() == ["disk: 120 bytes used of a budget of 100"]
