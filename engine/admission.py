"""Admission: may the next waiting request run now? It takes KV pages for those that may, and fetches KV for the others.

Requests are asked in the order of the queue. No one gets pages that somebody ahead waits for; but while one waits for
copies between device and host, the KV of those behind it is fetched already, or each step would fetch just one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cache.journal import Owner
from cache.sequence_kv import pages_for
from cache.session_cache import NO_PAGES, CacheMatch, Room, SessionAwareCache
from cache.tiers import PageNeed
from engine.request import LiveRequest
from engine.settings import SchedulerSettings


@dataclass(frozen=True, slots=True)
class Verdict:
    """READY with `num_tokens`: the request has its KV and runs with so many tokens. READY without: its KV is on its
    way, others may pass. WAIT: for pages that copies will free, none may pass. SHORT: those behind get nothing.
    """

    room: Room
    num_tokens: int = 0


class Admission:
    """One pass over the queue, for one step. `num_tokens` are left in the step."""

    def __init__(
        self, cache: SessionAwareCache, settings: SchedulerSettings, running: Sequence[LiveRequest]
    ) -> None:
        self._cache = cache
        self._settings = settings
        self._owed = sum(map(self._still_owed, running), NO_PAGES)
        self._beside_others = bool(running)
        self._ahead = NO_PAGES  # pages that requests passed over in this pass wait for
        self._none_may_pass = False

    def ask(self, request: LiveRequest, budget: int) -> Verdict:
        """After READY with tokens the request owns its KV, and the caller makes it run."""
        spec = request.spec
        match = self._cache.match_prefix(
            spec.session_id, spec.namespace, request.tokens.array, request.max_prefix_len, request.history
        )
        if match.loading:
            return self._pass_over(request, match, Room.READY)
        # Beside others all of it must fit, and what they still need for theirs, and one page more for everyone who
        # grows; alone it fits by itself.
        reserve = self._owed + self._ahead
        if self._beside_others and not self._cache.can_begin(match, len(request.tokens), reserve):
            return Verdict(Room.SHORT)
        if match.elsewhere:
            assert spec.session_id is not None
            return self._pass_over(request, match, self._cache.promote(spec.session_id, self._ahead))
        if self._none_may_pass:
            return self._pass_over(request, match, Room.WAIT)
        return self._begin(request, match, budget)

    def _begin(self, request: LiveRequest, match: CacheMatch, budget: int) -> Verdict:
        spec = request.spec
        kv = self._cache.begin(match, Owner(spec.session_id, spec.request_id))
        count = min(len(request.tokens) - kv.committed_len, self._settings.chunk_size, budget)
        room = self._cache.extend(kv, kv.committed_len + count, before=spec.session_id)
        if room is not Room.READY:
            self._cache.give_back(kv, spec.session_id, request.tokens, spec.history_len)
            return self._pass_over(request, match, room)
        request.kv = kv
        self._owed += self._still_owed(request)
        self._beside_others = True
        # What the session shared past a cut is computed again, and is shared again.
        request.shares_prompt = not match.from_slot or request.recomputes_history
        return Verdict(room, count)

    def _pass_over(self, request: LiveRequest, match: CacheMatch, room: Room) -> Verdict:
        on_device = match.prefix_len if room is Room.READY or not match.elsewhere else 0
        size = self._cache.page_size
        self._ahead += self._cache.need(pages_for(len(request.tokens), size) - pages_for(on_device, size))
        self._beside_others = True
        self._none_may_pass = self._none_may_pass or room is Room.WAIT
        return Verdict(room)

    def _still_owed(self, request: LiveRequest) -> PageNeed:
        """What a running request needs for the tokens it has, and a page more."""
        assert request.kv is not None
        return self._cache.need(1 + request.kv.pages_missing(request.total_len))
