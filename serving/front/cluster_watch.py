"""SharedWatch: many watchers of one front end, and one reader for all of them, which runs only while somebody watches.

Every watcher gets the state as often as it asked for, and each event once. No watcher delays another: a slow one gets
only the newest state that it has not read, and is dropped if it leaves too many events unread.
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
from serving.front.api.service import WatchedItem
from serving.watch.cluster_state import (
    Json,
    Look,
    audit_findings,
    leaked_pages,
    state_of,
    tier_moves,
    told_event,
)
from serving.wire.turns import ErrorInfo, ModelInfo, ServiceError

MOST_WATCHERS = 32
MOST_TOLD_FIRST = 200
"""How many events are kept for the next new watcher."""
MOST_UNREAD = 1000
"""A watcher that has more unread events is dropped."""
LOOK_INTERVAL_S = 1.0
"""The longest time between looks: a watcher that wants the state less often still gets events this soon."""
_EARLY_S = 0.05
"""A watcher gets the state of a look that is at most this much too early. Otherwise it would wait for the next look."""

logger = logging.getLogger(__name__)


class LookSource(Protocol):
    """Where looks come from."""

    async def look(self, cursor: str | None, limit: int) -> Look:
        """The cluster now, with at most `limit` sessions and the events after the cursor. Does not raise if a part does
        not answer, and does not wait for long."""

    async def audit_of(self, replica_id: str) -> Mapping[str, Any] | None:
        """The audit of one replica, in the form of its audit reply; None if it does not answer."""


class Watcher:
    """One watcher. Iterate over it for what is new, some items at a time. Waiting for items may be cancelled."""

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
        """Raises ServiceError if this watcher is dropped."""
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


class SharedWatch:
    """Reads the cluster from `source` for all watchers. Used on the front end's event loop only. `unix_clock` returns
    Unix time in seconds."""

    def __init__(
        self,
        source: LookSource,
        tasks: BackgroundTasks,
        model: Callable[[], ModelInfo],
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
        """How many leaked pages each replica had when it last answered an audit."""
        self._auditing: set[str] = set()

    @property
    def is_reading(self) -> bool:
        return self._reading is not None

    @asynccontextmanager
    async def watch(self, interval_s: float, limit: int) -> AsyncIterator[Watcher]:
        """Adds a watcher while the context lasts. Raises ServiceError if there are too many."""
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
                self._figures.clear()  # changes until somebody watches again are not news then

    def end(self) -> None:
        """Ends all watches, because the front end is about to stop and watchers must not delay it."""
        for watcher in self._watchers:
            watcher.end(GOES)

    def audited(self, audit: Mapping[str, Any]) -> None:
        """Tells watchers the findings of a replica's audit, which somebody asked for."""
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
            except Exception:  # watching goes on: the next look may succeed
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
                    states[watcher.limit] = _bytes(state_of(look, self._model().model_id, watcher.limit))
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
        """Starts an audit if the counters say that pages are missing: the audit says which. One that the replica does
        not answer is made again."""
        if not leaked:
            self._audited.pop(replica_id, None)
        elif self._audited.get(replica_id) != leaked and replica_id not in self._auditing:
            self._auditing.add(replica_id)
            self._tasks.start(self._audit(replica_id, leaked))

    async def _audit(self, replica_id: str, leaked: int) -> None:
        try:
            audit = await self._source.audit_of(replica_id)
            if audit is not None and audit["error"] is None:
                self._audited[replica_id] = leaked
                self.audited(audit)
        finally:
            self._auditing.discard(replica_id)


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
