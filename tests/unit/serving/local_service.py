"""The real service on one replica in this process: real engine, turns and session log, but no Ray and no network."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI

from controllers.cluster import Cluster
from engine.api import Finish, FinishReason
from serving.front.cluster_client import ClusterClient
from serving.front.http import create_http_app
from serving.front.known_places import KnownPlaces
from serving.front.ownership_cache import OwnershipCache
from serving.front.session_owners import SessionOwners
from serving.front.siblings import Siblings
from serving.front.turn_dispatch import TurnDispatcher
from serving.text.text import TextProcessor
from serving.trace.turn_traces import UNTRACED, FrontTraces
from serving.watch.metrics import IngressMetrics
from serving.wire.turns import TurnCall, TurnEvent
from tests.unit.serving.local_replicas import LocalReplicas
from tests.unit.serving.replica_rig import METRIC_LABELS, MODEL, VOCAB_SIZE, Rig, running_rig
from tests.unit.serving.small_tokenizer import byte_level_tokenizer


class Alone(Siblings):
    """The siblings of a front end that has none."""

    def __init__(self) -> None:
        pass

    async def ask(self, _method: str, *_args: Any) -> list[Any]:
        return []


class LocalService(ClusterClient):
    """A front end's service over `replicas` (None: the rig alone). `calls` are the turns that it was asked for, `ended`
    counts those that are over. `rig` is the replica that tests look into."""

    model = MODEL

    def __init__(
        self,
        rig: Rig,
        replicas: LocalReplicas | None = None,
        *,
        cache: OwnershipCache | None = None,
        siblings: Alone | None = None,
        metrics: IngressMetrics | None = None,
        failover_timeout_s: float = 0.0,
        traces: FrontTraces = UNTRACED,
    ) -> None:
        self.rig = rig
        self.calls: list[TurnCall] = []
        self.ended = 0
        self.replicas = replicas or LocalReplicas([rig])
        self.metrics = metrics or IngressMetrics("front", METRIC_LABELS)
        self.metrics.read(self.replicas.figures)
        controller: Any = rig.controller
        places = KnownPlaces(1000)
        self.owners = SessionOwners(
            self.replicas,
            controller,
            cache or OwnershipCache(1000),
            places,
            self.metrics,
            failover_timeout_s=failover_timeout_s,
        )
        self.dispatcher = TurnDispatcher(self.replicas, self.owners, places, self.metrics, traces=traces)
        super().__init__(
            model=MODEL,
            replicas=self.replicas,
            siblings=siblings or Alone(),
            controller=controller,
            owners=self.owners,
            dispatcher=self.dispatcher,
            places=places,
            metrics=self.metrics,
            settings={},
            tasks=rig.tasks,
            newcomer_grace_s=0.0,
        )
        if replicas is None:
            self.beat()

    @property
    def cluster(self) -> Cluster:
        """The controller's logic."""
        return self.rig.controller.cluster

    def beat(self) -> None:
        """Registers the replicas that live. Nothing else sends heartbeats here."""
        for replica_id in self.replicas.living():
            self.cluster.register_replica(self.replicas.rigs[replica_id].heartbeats.status())

    @asynccontextmanager
    async def run(self, call: TurnCall) -> AsyncIterator[AsyncIterator[TurnEvent]]:
        self.calls.append(call)
        try:
            async with super().run(call) as events:
                yield events
        finally:
            self.ended += 1

    async def metrics_text(self) -> str:
        await self.rig.heartbeats.beat()
        await self.rig.kv_watch.look()
        return await super().metrics_text()


@functools.cache
def small_text() -> TextProcessor:
    return TextProcessor(byte_level_tokenizer(), vocab_size=VOCAB_SIZE, max_context_len=MODEL.max_context_len)


def shown_text(token_ids: list[int]) -> str:
    """The text of a whole answer that reached its length limit."""
    return small_text().output_text().push(token_ids, Finish(FinishReason.LENGTH))


@asynccontextmanager
async def local_service(directory: Path) -> AsyncIterator[LocalService]:
    async with running_rig(directory, text=small_text()) as rig:
        yield LocalService(rig)


def client_of(app: FastAPI) -> httpx.AsyncClient:
    """A client that calls the application without a network. Replies arrive whole."""
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost", timeout=30.0)


@asynccontextmanager
async def local_client(directory: Path) -> AsyncIterator[tuple[httpx.AsyncClient, LocalService]]:
    async with (
        local_service(directory) as service,
        client_of(create_http_app(service, metrics=service.metrics)) as client,
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
