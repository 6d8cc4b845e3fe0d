"""ClusterWatch: many watchers of one front end, and one reader for all of them, which runs only while somebody watches.

Every watcher hears the state as often as it asked for, and each event once. None holds up another: of states that it
has not read it gets the last, and who leaves too many events unread is dropped.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Protocol

from serving.background import BackgroundTasks
from serving.watch.cluster_state import (
    Json,
    Look,
    audit_findings,
    leaked_pages,
    state_of,
    tier_moves,
    told_event,
)
from serving.wire.turns import ErrorInfo, ModelInfo, ServiceError, WatchedItem

MOST_WATCHERS = 32
MOST_TOLD_FIRST = 200
"""Events that are kept for whoever comes next."""
MOST_UNREAD = 1000
"""Events. A watcher that has as many is dropped."""
LOOK_INTERVAL_S = 1.0
"""Whoever wants to see the state more rarely hears of events as soon."""
_EARLY_S = 0.05
"""A look that is so much too early for a watcher counts for it: else it would wait for the next."""

logger = logging.getLogger(__name__)


class Source(Protocol):
    """Where looks come from."""

    async def look(self, cursor: str | None, limit: int) -> Look:
        """The cluster now, with `limit` sessions at most and the events behind the cursor. Never raises for somebody
        who does not answer, and does not wait for long."""

    async def audit_of(self, replica_id: str) -> Mapping[str, Any] | None:
        """The deep audit of one replica, as its audit reply has it; None if it does not answer."""


class Watcher:
    """One of those who watch. Iterate for what is new, some items at a time; waiting for it may be cancelled."""

    def __init__(self, interval_s: float, limit: int, clock: Callable[[], float]) -> None:
        self.interval_s = interval_s
        self.limit = limit
        self.is_new = True
        self._clock = clock
        self._due_s = 0.0
        self._state: bytes | None = None
        self._events: list[bytes] = []
        self._ended: ErrorInfo | None = None
        self._arrived = asyncio.Event()

    @property
    def wants_state(self) -> bool:
        return self._clock() + _EARLY_S >= self._due_s

    def show(self, state: bytes) -> None:
        self._due_s = self._clock() + self.interval_s
        self._state = state
        self._arrived.set()

    def tell(self, events: Iterable[bytes]) -> None:
        room = MOST_UNREAD + 1 - len(self._events)
        self._events += list(events)[: max(0, room)]
        if self._events:
            self._arrived.set()

    def end(self, why: ErrorInfo) -> None:
        self._ended = why
        self._arrived.set()

    def __aiter__(self) -> Watcher:
        return self

    async def __anext__(self) -> list[WatchedItem]:
        """Raises ServiceError for one that is dropped."""
        while self._state is None and not self._events and self._ended is None:
            self._arrived.clear()
            await self._arrived.wait()
        if self._ended is not None:
            raise ServiceError(self._ended)
        if len(self._events) > MOST_UNREAD:
            raise ServiceError(TOO_SLOW)
        items = [] if self._state is None else [WatchedItem("state", self._state)]
        items += [WatchedItem("event", each) for each in self._events]
        self._state, self._events = None, []
        return items


class ClusterWatch:
    """Used on the front end's event loop only. `unix_clock` returns Unix time in seconds."""

    def __init__(
        self,
        source: Source,
        tasks: BackgroundTasks,
        model: ModelInfo,
        *,
        most_watchers: int = MOST_WATCHERS,
        unix_clock: Callable[[], float] = time.time,
    ) -> None:
        self._source = source
        self._tasks = tasks
        self._model = model
        self._most_watchers = most_watchers
        self._unix_clock = unix_clock
        self._watchers: set[Watcher] = set()
        self._reading: asyncio.Task[None] | None = None
        self._wanted = asyncio.Event()
        self._cursor: str | None = None
        self._past: deque[bytes] = deque(maxlen=MOST_TOLD_FIRST)
        self._found: list[Json] = []
        self._known_findings: dict[str, None] = {}
        self._figures: dict[str, Mapping[str, Any]] = {}
        self._audited: dict[str, int] = {}
        """By replica, how many leaked pages it had when its books were last walked over."""

    @property
    def is_reading(self) -> bool:
        return self._reading is not None

    @asynccontextmanager
    async def watch(self, interval_s: float, limit: int) -> AsyncIterator[Watcher]:
        """Raises ServiceError if there are as many as there may be."""
        if len(self._watchers) >= self._most_watchers:
            raise ServiceError(TOO_MANY)
        watcher = Watcher(interval_s, limit, asyncio.get_running_loop().time)
        self._watchers.add(watcher)
        if self._reading is None:
            self._reading = self._tasks.start(self._read())
        self._wanted.set()
        try:
            yield watcher
        finally:
            self._watchers.discard(watcher)
            if not self._watchers and self._reading is not None:
                self._reading.cancel()
                self._reading = None
                self._figures.clear()  # what is counted until somebody watches again is not news then

    def end(self) -> None:
        """The front end is to go: nobody who watches is to hold it up."""
        for watcher in self._watchers:
            watcher.end(GOES)

    def audited(self, audit: Mapping[str, Any]) -> None:
        """Somebody had a replica's books walked over: what that has found is told to whoever watches."""
        for event in audit_findings(self._unix_clock(), audit):
            known = f"{event['replica']} {event['detail']}"
            if known not in self._known_findings:
                self._known_findings[known] = None
                self._found.append(event)
        while len(self._known_findings) > MOST_UNREAD:
            del self._known_findings[next(iter(self._known_findings))]
        del self._found[:-MOST_TOLD_FIRST]
        self._wanted.set()

    async def _read(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._wanted.clear()
            next_s = loop.time() + min(LOOK_INTERVAL_S, *(each.interval_s for each in self._watchers))
            try:
                limit = max(each.limit for each in self._watchers)
                look = await self._source.look(self._cursor, limit)
                self._take(look)
            except Exception:  # whoever watches goes on watching: the next look may be better
                logger.exception("a look at the cluster failed")
            try:
                async with asyncio.timeout_at(next_s):
                    await self._wanted.wait()
            except TimeoutError:
                continue

    def _take(self, look: Look) -> None:
        self._cursor = look.view.cursor or self._cursor
        news = sorted(self._news(look), key=lambda event: float(event["at"]))
        told = [_bytes(event) for event in news]
        self._past += told
        states: dict[int, bytes] = {}
        for watcher in self._watchers:
            if watcher.wants_state:
                if watcher.limit not in states:
                    states[watcher.limit] = _bytes(state_of(look, self._model.model_id, watcher.limit))
                watcher.show(states[watcher.limit])
            watcher.tell(self._past if watcher.is_new else told)
            watcher.is_new = False

    def _news(self, look: Look) -> list[Json]:
        news = [told_event(event) for event in look.view.events]
        found, self._found = self._found, []
        news += found
        for figures in look.replicas:
            replica_id = figures["replica_id"]
            if (before := self._figures.get(replica_id)) is not None:
                news += tier_moves(look.at_s, before, figures)
            self._look_for_leaks(replica_id, leaked_pages(figures))
        self._figures = {each["replica_id"]: each for each in look.replicas}
        return news

    def _look_for_leaks(self, replica_id: str, leaked: int) -> None:
        """The counters say that pages are missing: a walk over the books says which."""
        if leaked and self._audited.get(replica_id) != leaked:
            self._tasks.start(self._audit(replica_id))
        if leaked:
            self._audited[replica_id] = leaked
        else:
            self._audited.pop(replica_id, None)

    async def _audit(self, replica_id: str) -> None:
        audit = await self._source.audit_of(replica_id)
        if audit is not None:
            self.audited(audit)


TOO_MANY = ErrorInfo(
    503, "too_many_watchers", f"{MOST_WATCHERS} watch this front end already.", retry_after_s=5.0
)
GOES = ErrorInfo(
    503, "front_end_stops", "This front end is to go: connect again, to another.", retry_after_s=1.0
)
TOO_SLOW = ErrorInfo(
    503, "watcher_too_slow", f"{MOST_UNREAD} events were not read in time: connect again.", retry_after_s=1.0
)


def _bytes(told: Json) -> bytes:
    return json.dumps(told, ensure_ascii=False, separators=(",", ":")).encode()
