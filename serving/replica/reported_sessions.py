"""ReportedSessions: what each shard of the cluster controller is told of the sessions that this replica holds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

from controllers.records import HeartbeatReply, SessionReport, SessionStatus
from controllers.session import SessionController
from controllers.session_reports import ReportWriter
from engine.api import Engine, EngineError, EngineStats

KV_WAIT_S = 0.05
"""How long a heartbeat waits for the engine. The engine answers only between two steps."""
KV_LOOKS_PER_S = 10_000
"""Heartbeats report the size of each session's KV. For that they have the engine look at this many sessions per second
on average."""


class ReportedSessions:
    """Reports of `sessions`, with the sizes of their KV. `shard_of` is the shard of a session. Used on the replica's
    event loop only."""

    def __init__(
        self, engine: Engine, sessions: SessionController, num_shards: int, shard_of: Callable[[str], int]
    ) -> None:
        self._engine = engine
        self._sessions = sessions
        self._shard_of = shard_of
        self._writers = [ReportWriter() for _ in range(num_shards)]
        self._held: list[set[str]] = [set() for _ in range(num_shards)]
        """The sessions that each shard was told of, if there are several."""
        self._kv_tokens: dict[str, int] = {}
        self._kv_asked: Future[dict[str, int]] | None = None
        self._next_kv_look_s = 0.0

    async def look(self) -> None:
        """Notes what has changed since the last look."""
        await self._look_at_kv()
        self._note(self._sessions.take_changed())

    def next(self, shard: int) -> tuple[SessionReport, int | None]:
        """The next report to the shard. If the shard knows all of its sessions that are here once it has the report:
        also their number."""
        writer = self._writers[shard]
        report = writer.next(partial(self._status_of, self._engine.stats()), partial(self._held_of, shard))
        return report, self._num_held(shard) if writer.tells_all_in(report) else None

    def answered(self, shard: int, report: SessionReport, reply: HeartbeatReply) -> None:
        self._writers[shard].answered(report, reply)

    def has_more(self, shard: int) -> bool:
        """Whether there are changes that the shard is not known to have received."""
        return self._writers[shard].has_more

    def _note(self, session_ids: Iterable[str]) -> None:
        if len(self._writers) == 1:
            self._writers[0].note(session_ids)
            return
        changed: list[list[str]] = [[] for _ in self._writers]
        for session_id in session_ids:
            shard = self._shard_of(session_id)
            changed[shard].append(session_id)
            if self._sessions.epoch(session_id) is None:
                self._held[shard].discard(session_id)
            else:
                self._held[shard].add(session_id)
        for writer, names in zip(self._writers, changed, strict=True):
            writer.note(names)

    def _held_of(self, shard: int) -> list[str]:
        held = self._sessions.held()
        return held if len(self._writers) == 1 else [name for name in held if self._shard_of(name) == shard]

    def _num_held(self, shard: int) -> int:
        """A session that was not noted as changed counts for the first shard, so that its audit finds it."""
        if len(self._writers) == 1:
            return len(self._sessions)
        unnoted = len(self._sessions) - sum(map(len, self._held)) if shard == 0 else 0
        return len(self._held[shard]) + unnoted

    def _status_of(self, stats: EngineStats, session_id: str) -> SessionStatus | None:
        status = self._sessions.status(session_id)
        if status is None:
            return None
        num_tokens = self._kv_tokens.get(session_id, 0)
        windowed = min(num_tokens, stats.window_len or 0)
        total = num_tokens * stats.page_size_bytes + windowed * stats.window_page_size_bytes
        return replace(status, size_bytes=total // stats.page_size)

    async def _look_at_kv(self) -> None:
        """Updates the number of KV tokens per session from the engine, or keeps the last numbers while a step takes
        long. The engine looks at every session, so the more sessions there are, the less often it is asked. It also has
        the KV of unnamed sessions, of which no shard knows."""
        now_s = asyncio.get_running_loop().time()
        if now_s < self._next_kv_look_s:
            return
        try:
            asked = self._kv_asked = self._kv_asked or self._engine.session_kv_tokens()
        except EngineError:
            return
        waiting = asyncio.wrap_future(asked)
        done, _ = await asyncio.wait([waiting], timeout=KV_WAIT_S)
        if done and self._kv_asked is asked:
            self._kv_asked = None
        if done and waiting.exception() is None:
            before, self._kv_tokens = self._kv_tokens, waiting.result()
            differing = _differing(before, self._kv_tokens)
            self._note(name for name in differing if self._sessions.epoch(name) is not None)
            self._next_kv_look_s = now_s + len(self._kv_tokens) / KV_LOOKS_PER_S


def _differing(before: dict[str, int], after: dict[str, int]) -> set[str]:
    """Keys whose entries are not the same in both."""
    return {key for key, _ in before.items() ^ after.items()}
