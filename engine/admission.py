"""Admission: decides whether the next waiting request may run now. Takes KV pages for requests that may, and starts to
fetch KV for others.

Requests are asked in queue order. No request gets pages that a request ahead of it waits for. But while one request
waits for copies between device and host, the KV of those behind it is fetched already; otherwise each step would fetch
only one.

A pass over the queue continues in the next step where it stopped. A request that was passed over is asked again only
when something has changed that might let it in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cache.journal import Holder
from cache.pages import NO_PAGES, PageCounts
from cache.sequence_kv import pages_for
from cache.session_cache import CacheMatch, Room, SessionAwareCache
from engine.request import LiveRequest
from engine.settings import SchedulerSettings

LOOK_AHEAD = 16
"""How many requests are asked behind one that waits for pages. None of them may run before it, but their KV may be
fetched."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """READY with `num_tokens`: the request has its KV and runs with so many tokens. READY without: its KV is on its
    way, and requests behind it may run. WAIT: it waits for pages that copies will free, and no request behind it may
    run. SHORT: pages are missing, and requests behind it get nothing."""

    room: Room
    num_tokens: int = 0


class Admission:
    """The current pass over the queue. The scheduler says when a new pass must begin (`begin_anew`). Admission notices
    changes in the cache itself."""

    def __init__(self, cache: SessionAwareCache, settings: SchedulerSettings) -> None:
        self._cache = cache
        self._settings = settings
        self._seen = cache.room_signs()
        self._running: Sequence[LiveRequest] = ()
        self._owed: PageCounts | None = None  # computed when the first request of a step is asked
        self._loading: dict[str, PageCounts] = {}  # by request id: KV is on its way; pages needed besides it
        self._loading_before: dict[str, PageCounts] = {}
        self.begin_anew()

    def begin_anew(self) -> None:
        """Starts the pass again from the front. Call it when a request has ended, was put back or now shares its
        prompt, or when the queue has changed other than at its end."""
        self._place = 0
        self._ahead = NO_PAGES  # pages that requests passed over wait for
        self._num_looked_ahead = 0
        self._none_may_pass = False
        self._is_over = False
        if self._loading:
            self._loading_before, self._loading = self._loading, {}

    def resume(self, running: Sequence[LiveRequest]) -> None:
        """Begins a step in which the `running` requests run."""
        if not running or self._cache.room_signs().promise_more_than(self._seen):
            self.begin_anew()
        self._running = running
        self._owed = None

    @property
    def place(self) -> int | None:
        """Index in the queue of the next request to ask; all before it were passed over. None: there is none to ask."""
        return None if self._is_over else self._place

    def ask(self, request: LiveRequest, budget: int) -> Verdict:
        """Decides on `request` when `budget` tokens are left in the step. After READY with tokens the request owns its
        KV, and the caller must run it."""
        verdict = self._ask(request, budget)
        if verdict.room is Room.SHORT:
            self._is_over = True
        elif not verdict.num_tokens:
            self._place += 1
            self._num_looked_ahead += self._none_may_pass
            self._is_over = self._num_looked_ahead > LOOK_AHEAD
        self._seen = self._cache.room_signs()
        return verdict

    def _ask(self, request: LiveRequest, budget: int) -> Verdict:
        spec = request.spec
        need = self._loading_before.get(request.request_id)
        if need is not None and self._cache.is_loading(spec.session_id):
            return self._wait_for_load(request, need)
        match = self._cache.match_prefix(
            spec.session_id, spec.namespace, request.tokens.array, request.max_prefix_len, request.history
        )
        if match.loading:
            return self._pass_over(request, match, Room.READY)
        # Beside other requests there must be pages for all of it, for what the others still need, and one more for each
        # running request. A request alone always fits, unless a disk hangs to which pages are lent.
        if self._owed is None:
            self._owed = self._still_owed(self._running)
        beside_others = bool(self._running) or self._place > 0 or self._cache.disk_hangs
        if beside_others and not self._cache.can_begin(match, len(request.tokens), self._owed + self._ahead):
            return Verdict(Room.SHORT)
        if match.elsewhere:
            assert spec.session_id is not None
            return self._pass_over(request, match, self._cache.promote(spec.session_id, self._ahead))
        if self._none_may_pass:
            return self._pass_over(request, match, Room.WAIT)
        return self._begin(request, match, budget)

    def _begin(self, request: LiveRequest, match: CacheMatch, budget: int) -> Verdict:
        spec = request.spec
        kv = self._cache.begin(match, Holder(spec.session_id, spec.request_id))
        count = min(len(request.tokens) - kv.committed_len, self._settings.chunk_size, budget)
        room = self._cache.extend(kv, kv.committed_len + count, before=spec.session_id)
        if room is not Room.READY:
            self._cache.give_back(kv, spec.session_id, request.tokens, spec.history_len)
            return self._pass_over(request, match, room)
        request.kv = kv
        self._loading_before.pop(request.request_id, None)
        assert self._owed is not None
        self._owed += self._still_owed([request])
        # A session that continues from its slot does not share its prompt. But if part of its history is computed
        # again, what it had shared of that is shared again.
        request.shares_prompt = not match.from_slot or request.recomputes_history
        return Verdict(room, count)

    def _pass_over(self, request: LiveRequest, match: CacheMatch, room: Room) -> Verdict:
        on_device = match.prefix_len if room is Room.READY or not match.elsewhere else 0
        size = self._cache.page_size
        need = self._cache.need([pages_for(len(request.tokens), size) - pages_for(on_device, size)])
        if room is Room.READY:
            return self._wait_for_load(request, need)
        self._ahead += need
        self._none_may_pass = self._none_may_pass or room is Room.WAIT
        return Verdict(room)

    def _wait_for_load(self, request: LiveRequest, need: PageCounts) -> Verdict:
        self._loading[request.request_id] = need
        self._ahead += need
        return Verdict(Room.READY)

    def _still_owed(self, running: Sequence[LiveRequest]) -> PageCounts:
        """Pages that running requests still need for the tokens they have, plus one more for each."""
        more = []
        for request in running:
            assert request.kv is not None
            more.append(1 + request.kv.pages_missing(request.total_len))
        return self._cache.need(more)
