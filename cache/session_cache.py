"""SessionAwareCache: keeps each session's KV between turns, over any PrefixCache.

Between turns a session's SequenceKV rests in its slot. A turn *moves* it out to the request and, at its end, back:
it is never in two places, so it can never be counted twice. Idle slots are always demotable.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from cache.audit import PageAccounts, check_balance, check_pages
from cache.pages import PageArray
from cache.prefix_cache import PrefixCache, PrefixMatch
from cache.radix_tree import TokenArray
from cache.sequence_kv import SequenceKV, pages_for


class SessionBorrowed(RuntimeError):
    """The session's KV is out with a turn; the operation needs it in its slot."""


@dataclass(slots=True)
class SessionSlot:
    """A session's KV between turns. `kv` is None while it is lent to the request `borrower`."""

    kv: SequenceKV | None
    borrower: str | None = None


@dataclass(frozen=True, slots=True)
class CacheMatch:
    """Where a request could start: `prefix_len` tokens of KV are there, from a slot or from the shared tree."""

    session_id: str | None
    prefix_len: int
    prefix: PrefixMatch | None
    num_unlocked: int

    @property
    def from_slot(self) -> bool:
        return self.prefix is None


class SessionAwareCache:
    """The one facade the scheduler talks to. Lengths in tokens, sizes in pages."""

    def __init__(self, inner: PrefixCache) -> None:
        self._inner = inner
        self._slots: OrderedDict[str, SessionSlot] = OrderedDict()  # least recently used first
        self.num_demotions = 0
        self.num_evicted_pages = 0

    @property
    def page_size(self) -> int:
        return self._inner.page_size

    @property
    def num_pages(self) -> int:
        return self._inner.num_pages

    @property
    def num_sessions(self) -> int:
        return len(self._slots)

    def match_prefix(
        self,
        session_id: str | None,
        namespace: str,
        tokens: Callable[[], TokenArray],
        max_len: int,
        history_len: int,
    ) -> CacheMatch:
        """Finds reusable KV for a request over its first `max_len` tokens (the caller's logit reserve applied).

        A slot's KV past the session's `history_len` is stale: its turn was never committed, or was rewound.
        Changes nothing, so a request refused after it can come back. `tokens` is called only if the tree is asked:
        a session that continues costs the same at any length. Raises SessionBorrowed during a turn.
        """
        slot = self._slots.get(session_id) if session_id is not None else None
        if slot is not None:
            if slot.kv is None:
                raise SessionBorrowed(f"session {session_id} is in a turn of request {slot.borrower}")
            return CacheMatch(session_id, min(slot.kv.committed_len, max_len, history_len), None, 0)
        prefix = self._inner.match_prefix(namespace, tokens()[: max(max_len, 0)])
        return CacheMatch(session_id, prefix.prefix_len, prefix, prefix.num_unlocked)

    def can_begin(self, match: CacheMatch, target_len: int, reserve_pages: int = 0) -> bool:
        """Are there pages for `target_len` tokens on this match, and `reserve_pages` more, without a retraction?"""
        needed = pages_for(target_len, self.page_size) - pages_for(match.prefix_len, self.page_size)
        room = self._inner.num_free + self._inner.cached_pages - match.num_unlocked - reserve_pages
        if needed <= room:
            return True
        # Demoting idle sessions frees their private pages, and the shared ones that nobody in flight holds. Counting
        # more would demote them all in vain.
        own = self._slots.get(match.session_id) if match.session_id is not None else None
        idle = sum(slot.kv.num_private_pages for slot in self._slots.values() if slot.kv and slot is not own)
        return needed <= room + idle + self._inner.yielding_pages(match.prefix, own.kv if own else None)

    def begin(self, match: CacheMatch, request_id: str) -> SequenceKV:
        """Moves the matched KV to a request. A session's tail past the prefix is freed first."""
        if match.prefix is not None:
            fresh = self._inner.begin(match.prefix)
            if match.session_id is not None:
                self._slots[match.session_id] = SessionSlot(None, request_id)
            return fresh
        assert match.session_id is not None
        slot = self._slots[match.session_id]
        kv = slot.kv
        assert kv is not None
        slot.kv, slot.borrower = None, request_id
        self._inner.lend(kv)
        self._free_tail(kv, match.prefix_len)
        return kv

    def extend(self, kv: SequenceKV, target_len: int) -> bool:
        """Adds pages for `target_len` tokens, evicting cached prefixes, then demoting idle sessions, if it must.

        False if pages are still short; what was evicted or demoted on the way stays so.
        """
        while not self._inner.extend(kv, target_len):
            missing = kv.pages_missing(target_len) - self._inner.num_free
            evicted = self._inner.evict(missing)
            self.num_evicted_pages += evicted
            if evicted < missing and not self._demote_one():
                return self._inner.extend(kv, target_len)
        return True

    def cache_unfinished(self, kv: SequenceKV, tokens: TokenArray) -> None:
        """Shares a computed prompt with requests to come; its request goes on."""
        self._inner.cache_unfinished(kv, tokens)

    def finish(self, kv: SequenceKV, tokens: TokenArray) -> None:
        """A request without session ended well: its KV stays as a shared prefix, evictable."""
        self._inner.shrink(kv, len(tokens))
        self._inner.cache_finished(kv, tokens)

    def finish_turn(self, session_id: str, kv: SequenceKV, target_len: int) -> None:
        """A turn ended well at `target_len` tokens (input plus finished output): its KV moves to the slot."""
        self._trim_overshoot(kv, target_len)
        self._park(session_id, kv)

    def release(self, kv: SequenceKV) -> None:
        """A request without session was aborted or retracted: its KV is gone."""
        self._inner.release(kv)

    def rollback_turn(self, session_id: str, kv: SequenceKV, history_len: int) -> None:
        """A turn was aborted or retracted: all it computed past `history_len` is freed, the rest moves back."""
        self._inner.shrink(kv, history_len)
        self._park(session_id, kv)

    def rewind_session(self, session_id: str, length: int) -> None:
        """Cuts an idle session's KV to at most `length` tokens. Raises SessionBorrowed during a turn."""
        slot = self._idle_slot(session_id)
        if slot is not None and slot.kv is not None and length < slot.kv.allocated_len:
            self._inner.shrink(slot.kv, length)
            if slot.kv.committed_len == 0:
                self.release_session(session_id)

    def release_session(self, session_id: str) -> None:
        """Frees an idle session's KV and forgets it. Raises SessionBorrowed during a turn; unknown ids are fine."""
        slot = self._idle_slot(session_id)
        if slot is not None:
            assert slot.kv is not None
            self._inner.release(slot.kv)
            del self._slots[session_id]

    def flush(self) -> None:
        """Drops every cached prefix that nobody holds."""
        self._inner.evict(self._inner.cached_pages)

    def held_tokens(self) -> dict[str, int]:
        """Tokens of KV in each idle session's slot."""
        return {sid: slot.kv.committed_len for sid, slot in self._slots.items() if slot.kv is not None}

    def accounts(self) -> PageAccounts:
        """The pool's books, each account counted by its own keeper."""
        return PageAccounts(
            total=self._inner.num_pages,
            free=self._inner.num_free,
            cached=self._inner.cached_pages,
            protected=self._inner.protected_pages,
            session=sum(slot.kv.num_private_pages for slot in self._slots.values() if slot.kv is not None),
            in_flight=self._inner.in_flight_pages,
        )

    def check(self, *, deep: bool = False) -> None:
        """Raises BooksError unless the books balance; `deep` walks every page."""
        check_balance(self.accounts())
        if deep:
            check_pages(self._inner.num_pages, self._claims())

    def _claims(self) -> Iterator[tuple[str, PageArray]]:
        yield from self._inner.claims()
        for session_id, slot in self._slots.items():
            if slot.kv is not None:
                yield f"session {session_id}", slot.kv.private_pages

    def _free_tail(self, kv: SequenceKV, prefix_len: int) -> None:
        """Before a turn extends at `prefix_len`, every page wholly past it is freed.

        Otherwise the turn would write its page-table entries over pages that nobody could free any more. A gap
        comes from speculation past what was accepted, a retracted turn that resumes one short, or input
        log-probabilities that recompute the last token; in the common case there is none.
        """
        self._inner.shrink(kv, prefix_len)

    def _trim_overshoot(self, kv: SequenceKV, target_len: int) -> None:
        """At a turn's end every length is cut to `target_len`, so that the next turn's tokens and KV agree."""
        self._inner.shrink(kv, target_len)

    def _park(self, session_id: str, kv: SequenceKV) -> None:
        """Moves KV from its request to the slot; a slot without KV is dropped, the token log has the rest."""
        slot = self._slots[session_id]
        assert slot.kv is None
        if kv.committed_len == 0:
            self._inner.release(kv)
            del self._slots[session_id]
            return
        self._inner.reclaim(kv)
        slot.kv, slot.borrower = kv, None
        self._slots.move_to_end(session_id)

    def _demote_one(self) -> bool:
        """Demotes the longest idle session to its token log. False if no slot is idle."""
        for session_id, slot in self._slots.items():
            if slot.kv is not None:
                self._inner.release(slot.kv)
                del self._slots[session_id]
                self.num_demotions += 1
                return True
        return False

    def _idle_slot(self, session_id: str) -> SessionSlot | None:
        slot = self._slots.get(session_id)
        if slot is not None and slot.kv is None:
            raise SessionBorrowed(f"session {session_id} is in a turn of request {slot.borrower}")
        return slot
