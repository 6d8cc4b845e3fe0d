"""The real service on one replica in this process: real engine, turns and session log, but no Ray and no network."""

from __future__ import annotations

import asyncio
import functools
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, contextmanager
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI
from msgspec.structs import replace

from controllers.cluster import Cluster
from controllers.errors import SessionNotFound
from controllers.joined_answers import joined_measures
from controllers.kept_answers import CALL_KEY
from controllers.records import TREE_KEY, ForkOrder, LedgerEntry
from controllers.session_keys import id_in, session_key, tenant_in
from engine.api import EngineError, Finish, FinishReason
from serving.front.api.service import WatchedItem
from serving.front.cluster_watch import ClusterWatch
from serving.front.http import create_http_app
from serving.front.known_places import KnownPlaces
from serving.front.replica_calls import ReplicaCalls
from serving.front.replica_link import LinkTimes
from serving.replica.replica import replica_figures
from serving.text.text import TextProcessor
from serving.watch.audit_reply import cluster_audit, replica_audit
from serving.watch.cluster_state import Look
from serving.watch.metrics import IngressMetrics
from serving.watch.page import cluster_page
from serving.wire.calls import KeepNote, MoveSession, RewindSession
from serving.wire.errors import error_info, told_to_clients
from serving.wire.transcripts import transcript_of
from serving.wire.tree_ids import told_session
from serving.wire.turns import (
    ChatPrompt,
    ErrorInfo,
    ForkedSession,
    ModelInfo,
    MovedSession,
    ServiceError,
    SessionInfo,
    TextPrompt,
    TokenizedPrompt,
    TurnCall,
    TurnEvent,
    TurnTranscript,
)
from tests.unit.serving.replica_rig import REPLICA_ID, VOCAB_SIZE, Rig, running_rig
from tests.unit.serving.small_tokenizer import byte_level_tokenizer

METRIC_LABELS = MappingProxyType({"cluster": "kedge", "model": "null-model"})
MODEL = ModelInfo("null-model", "/models/null", "/models/null", 512, VOCAB_SIZE, 1_700_000_000, "hermes")


class LocalService:
    """A TurnService on one replica. `calls` are the turns that it was asked for."""

    model = MODEL

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.metrics = IngressMetrics("front", METRIC_LABELS)
        self.metrics.read(_calls_of(rig).figures)
        self.places = KnownPlaces(1000)
        self.calls: list[TurnCall] = []
        self.ended = 0
        self.watchers = ClusterWatch(LocalSource(self), rig.tasks, MODEL)

    @property
    def cluster(self) -> Cluster:
        """The controller's logic. Each access registers the replica, because nothing else sends heartbeats here."""
        cluster = self.rig.controller.cluster
        cluster.register_replica(self.rig.heartbeats.status())
        return cluster

    @asynccontextmanager
    async def run(self, call: TurnCall) -> AsyncIterator[AsyncIterator[TurnEvent]]:
        self.calls.append(call)
        call = self.places.recognized(call)
        epoch = None
        if call.session is not None:
            key = session_key(call.tenant, call.session.session_id)
            epoch = self._epoch(key, create=call.session.create)
            call = replace(call, session=replace(call.session, session_id=key))
        try:
            async with aclosing(self.rig.events(call, epoch)) as events:
                first = await anext(events)
                if first.error is not None:
                    raise ServiceError(first.error)
                yield _from(first, events)
        finally:
            self.ended += 1

    def _epoch(self, key: str, *, create: bool) -> int:
        with told_to_clients():
            return self.cluster.resolve(key, create, tenant_in(key)).epoch

    async def open_session(
        self,
        session_id: str | None,
        *,
        timeout_s: float | None,
        capacity_tokens: int | None,
        tenant: str,
        tree: bool = False,
    ) -> str:
        open_key = (TREE_KEY if tree else "") + uuid.uuid4().hex
        with told_to_clients():
            opened = self.cluster.open_session(session_id, tenant, timeout_s, capacity_tokens, open_key)
        return id_in(opened.session_id)

    async def is_tree(self, session_id: str, *, tenant: str) -> bool:
        with told_to_clients():
            entry = self.cluster.session(session_key(tenant, session_id))
        return (entry.open_key or "").startswith(TREE_KEY)

    async def fork_session(
        self,
        session_id: str,
        new_session_id: str | None,
        *,
        length: int | None,
        timeout_s: float | None,
        tenant: str,
    ) -> ForkedSession:
        key, child_id = session_key(tenant, session_id), new_session_id or uuid.uuid4().hex
        order = ForkOrder(session_key(tenant, child_id), uuid.uuid4().hex, length, timeout_s)
        with told_to_clients():
            forked = await self.rig.host.fork(key, self._epoch(key, create=False), order)
            return replace(forked, session_id=child_id)

    async def rewind_session(self, session_id: str, length: int, *, tenant: str) -> None:
        key = session_key(tenant, session_id)
        with told_to_clients():
            epoch = self._epoch(key, create=False)
            await self.rig.empty_turns.rewind(RewindSession(key, epoch, length, uuid.uuid4().hex))

    async def move_session(self, session_id: str, to: str | None, *, tenant: str) -> MovedSession:
        key = session_key(tenant, session_id)
        epoch = self._epoch(key, create=False)
        with told_to_clients():
            return await self.rig.moves.move(MoveSession(key, epoch, to, epoch))

    async def keep_note(
        self, session_id: str, note: bytes, *, expected_turn: int | None, tenant: str
    ) -> None:
        key, once = session_key(tenant, session_id), f"{CALL_KEY}{uuid.uuid4().hex}"
        order = KeepNote(key, self._epoch(key, create=False), note, once, expected_turn)
        with told_to_clients():
            await self.rig.empty_turns.keep_note(order)

    async def transcript(self, session_id: str, *, tenant: str) -> list[TurnTranscript]:
        with told_to_clients():
            notes = self.cluster.notes
            found = notes.page(session_id, tenant)
            while page := found and notes.page(session_id, tenant, found[-1].turn_index):
                found += page
            return [transcript_of(note) for note in found]

    async def forget_note(self, session_id: str, turn_index: int, *, tenant: str) -> None:
        with told_to_clients():
            self.cluster.notes.forget(session_id, tenant, turn_index)

    async def drain_replica(self, replica_id: str) -> None:
        if replica_id != REPLICA_ID:
            raise ServiceError(
                ErrorInfo(404, "replica_not_found", f"There is no replica {replica_id!r}.", "replica_id")
            )
        with told_to_clients():
            await self.rig.drain.order()

    async def audit(self) -> dict[str, Any]:
        report = await asyncio.wrap_future(self.rig.engine.audit())
        return cluster_audit([replica_audit(REPLICA_ID, report)], {REPLICA_ID})

    def watch(
        self, interval_s: float, limit: int
    ) -> AbstractAsyncContextManager[AsyncIterator[Sequence[WatchedItem]]]:
        return self.watchers.watch(interval_s, limit)

    async def close_session(self, session_id: str, *, tenant: str) -> bool:
        key = session_key(tenant, session_id)
        try:
            epoch = self._epoch(key, create=False)
        except ServiceError:
            return False
        return await self.rig.host.close(key, epoch) or self.cluster.close_session(key)

    async def abort(self, request_id: str | None, *, all_requests: bool = False, tenant: str) -> None:
        self.rig.turns.abort(None if all_requests else request_id, tenant)

    async def tokenize(
        self, prompt: ChatPrompt | TextPrompt, *, add_special_tokens: bool, with_token_strs: bool
    ) -> TokenizedPrompt:
        with _as_service_errors():
            return await self.rig.builder.tokenize(
                prompt, add_special_tokens, with_token_strs=with_token_strs
            )

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        with _as_service_errors():
            return await self.rig.builder.detokenize(tuple(token_ids), skip_special_tokens)

    async def flush(self) -> bool:
        return await asyncio.wrap_future(self.rig.engine.flush())

    async def sessions(self, *, tenant: str | None, after: str | None, limit: int) -> list[SessionInfo]:
        return list(map(_session_info, self.cluster.sessions(tenant, after, limit)))

    async def session(self, session_id: str, *, tenant: str) -> SessionInfo | None:
        try:
            session = _session_info(self.cluster.session(session_key(tenant, session_id)))
        except SessionNotFound:
            return None
        return session if (session.tenant, session.session_id) == (tenant, session_id) else None

    async def server_info(self) -> dict[str, Any]:
        return {"replicas": [replica_figures(REPLICA_ID, 0, 0, self.rig.engine)]}

    async def metrics_text(self) -> str:
        await self.rig.heartbeats.beat()
        await self.rig.kv_watch.look()
        page = [self.rig.metrics.render()]
        measures = joined_measures([self.cluster.measures()])
        return cluster_page(self.metrics, page, (), measures, present=1, expected=1)

    async def healthy(self) -> bool:
        return self.rig.engine.alive


def _calls_of(rig: Rig) -> ReplicaCalls:
    """A front end's calls to replicas. There are none here, because turns go to the rig directly."""

    def refuse(*_: Any) -> Any:
        raise AssertionError("no replica is called")

    unused: Any = rig.controller
    return ReplicaCalls(unused, refuse, refuse, rig.tasks, Random(0), times=LinkTimes(), call_timeout_s=1.0)


class LocalSource:
    """Looks at a local service as ClusterSource looks at a cluster. `looks` counts the looks."""

    def __init__(self, service: LocalService) -> None:
        self._service = service
        self.looks = 0

    async def look(self, cursor: str | None, limit: int) -> Look:
        self.looks += 1
        rig, cluster = self._service.rig, self._service.cluster
        view = cluster.watch.view(cursor, limit)
        keys = [entry.session_id for entry in view.recent]
        places = await asyncio.wrap_future(rig.engine.session_places(keys))
        return Look(
            time.time(),
            view,
            [replica_figures(REPLICA_ID, 0, 0, rig.engine)],
            [told_session(_session_info(entry)) for entry in view.recent],
            {REPLICA_ID: places},
        )

    async def audit_of(self, replica_id: str) -> dict[str, Any]:
        return replica_audit(replica_id, await asyncio.wrap_future(self._service.rig.engine.audit()))


@contextmanager
def _as_service_errors() -> Iterator[None]:
    """Turns the engine's errors into those that a client of a replica gets."""
    try:
        yield
    except EngineError as error:
        raise ServiceError(error_info(error)) from error


def _session_info(entry: LedgerEntry) -> SessionInfo:
    return SessionInfo(
        id_in(entry.session_id),
        entry.replica_id,
        entry.epoch,
        entry.tokens,
        entry.size_bytes,
        entry.turns,
        idle_s=0.0,
        in_turn=entry.in_turn,
        tenant=entry.tenant,
    )


async def _from(first: TurnEvent, events: AsyncIterator[TurnEvent]) -> AsyncIterator[TurnEvent]:
    yield first
    async for event in events:
        yield event


@functools.cache
def small_text() -> TextProcessor:
    return TextProcessor(byte_level_tokenizer(), vocab_size=VOCAB_SIZE, max_context_len=MODEL.max_context_len)


def shown_text(token_ids: list[int]) -> str:
    """The text of a whole answer that reached its length limit."""
    return small_text().output_text().push(token_ids, Finish(FinishReason.LENGTH))


@asynccontextmanager
async def local_service(directory: Path) -> AsyncIterator[LocalService]:
    async with running_rig(directory, text=small_text(), metric_labels=METRIC_LABELS) as rig:
        yield LocalService(rig)


def client_of(app: FastAPI) -> httpx.AsyncClient:
    """A client that calls the application without a network. Replies arrive whole."""
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost", timeout=30.0)


@asynccontextmanager
async def local_client(directory: Path) -> AsyncIterator[tuple[httpx.AsyncClient, LocalService]]:
    async with (
        local_service(directory) as service,
        client_of(create_http_app(lambda: service, metrics=service.metrics)) as client,
    ):
        yield client, service


@asynccontextmanager
async def http_server(app: FastAPI, *, root_path: str = "") -> AsyncIterator[str]:
    """Serves the application over real HTTP on this event loop. Yields its address. `root_path`: the application sees
    this prefix before its paths, as it does from Ray Serve."""
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_config=None, root_path=root_path)
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        serving.cancel()  # told to exit, it would look ten times a second whether it should
        await asyncio.wait([serving])
        await server.shutdown()
