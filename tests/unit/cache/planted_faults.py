"""Damages the KV books on purpose, so that tests can show that the audit finds it."""

from __future__ import annotations

from typing import Literal

from cache.audit import PoolName
from cache.sequence_kv import SequenceKV
from cache.session_cache import SessionAwareCache
from cache.slots import SlotState

FaultKind = Literal["leak", "double free", "double count"]


def plant(cache: SessionAwareCache, kind: FaultKind, session_id: str, pool: PoolName = "full") -> int:
    """Damages the books of an idle session. Returns a page of `pool` that they are wrong about.

    leak: the session loses its last page, and nobody gets that page. double free: the last page is free while the
    session still has it. double count: the session's pages belong to a turn as well as to the slot. Every counter still
    balances then, so only the walk of a strict check sees it. The session cannot be used afterwards. Raises ValueError
    if the session holds no private page.
    """
    kv = _idle_kv(cache, session_id, pool)
    if pool == "window":
        assert kv.window is not None
        pages = kv.window.live(kv.num_protected_pages)
    else:
        pages = kv.private_pages
    if len(pages) == 0:
        raise ValueError(f"session {session_id} has no private page in pool {pool}")
    last = pages[-1:].copy()
    if kind == "leak":
        _lose_last(kv, pool)
    elif kind == "double free":
        window = cache._inner.window
        allocator = window.allocator if pool == "window" and window is not None else cache._inner.allocator
        allocator.free(last, kv.holder)
    else:
        cache._inner.lend(kv)
    return int(last[0])


def _idle_kv(cache: SessionAwareCache, session_id: str, pool: PoolName) -> SequenceKV:
    slot = cache._slots.get(session_id)
    if slot is None or slot.state is not SlotState.IDLE or slot.kv is None:
        raise ValueError(f"session {session_id} holds no KV on the device")
    if pool == "window" and slot.kv.window is None:
        raise ValueError("there is no window pool")
    return slot.kv


def _lose_last(kv: SequenceKV, pool: PoolName) -> None:
    if pool == "window":
        assert kv.window is not None
        kv.window.cut(kv.window.num_pages - 1)
        kv.account.window -= 1
    else:
        kv.free_aligned((kv.num_pages - 1) * kv.page_size)
