"""Whose KV is where: bytes by namespace and tier. Walks over all sessions, so it should not be asked often."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from cache.sequence_kv import SequenceKV
from cache.slots import SessionSlot
from cache.tiers import TierSizes


def kv_bytes(
    slots: Iterable[SessionSlot], in_turn: Iterable[SequenceKV], sizes: TierSizes
) -> dict[tuple[str, str], int]:
    """Bytes of the sessions' KV and of running requests. Pages in the radix tree are shared and not counted."""
    num_bytes: Counter[tuple[str, str]] = Counter()

    def count(kv: SequenceKV) -> None:
        num_bytes[kv.namespace, "device"] += (
            kv.num_private_pages * sizes.page_bytes + kv.num_private_window_pages * sizes.window_page_bytes
        )

    for kv in in_turn:
        count(kv)
    for slot in slots:
        if slot.kv is not None:
            count(slot.kv)
        if (entry := slot.entry) is not None:
            num_bytes[entry.namespace, entry.tier] += entry.num_bytes
    return dict(num_bytes)
