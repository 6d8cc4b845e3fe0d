"""The processes of a cluster: replicas, ingresses and the controller. Each is the product's class on a loop of its own.

When one of them dies, a successor starts. Successors of replicas and ingresses have new names.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

from controllers.commit_groups import Write
from controllers.errors import StoreError
from engine.api import Engine
from engine.settings import ModelSettings
from serving.front.ingress import Ingress, IngressEnvironment
from serving.replica.environment import ReplicaEnvironment
from serving.replica.replica import LLMReplica
from serving.settings.config import AppArgs
from serving.text.text import TextProcessor
from serving.wire.commit_client import CommitClient
from serving.wire.commit_server import CommitServer
from serving.wire.controller_calls import CONTROLLER_TIMEOUT_S, ControllerCalls
from serving.wire.shard_calls import ShardCalls
from tests.simulation.engine_loop import EngineFactory
from tests.simulation.health import HealthChecks
from tests.simulation.links import Links, SimulatedConnections, SimulatedListener
from tests.simulation.logs import Log
from tests.simulation.loop import World
from tests.simulation.network import Network, Party
from tests.simulation.serve_model import (
    ControllerActor,
    ControllerHandle,
    IngressesHandle,
    ServeModel,
)
from tests.simulation.web import Web

NOTICED_S = (0.05, 3.0)
"""Serve knows after this time that a replica is dead."""
SERVE_LOOKS_S = 0.1
"""How often Serve checks whether a successor is ready."""
STARTS_S = (0.3, 2.5)


class Cluster:
    """All processes and the network between them. `tiers` are the pages in host memory and on disk for the KV of idle
    sessions. `slowness` is that of the engines."""

    def __init__(
        self,
        world: World,
        random: Random,
        args: AppArgs,
        network: Network,
        log: Log,
        tiers: tuple[int, int],
        slowness: float,
    ) -> None:
        self.world = world
        self.random = random
        self.network = network
        self.serve = ServeModel(self.network, random)
        self.links = Links(self.network, random)
        self.args = args
        self.engines: dict[str, EngineFactory] = {}
        self.ill: list[str] = []
        """Replicas that Serve replaced because they reported that they were not well, though nobody had asked them to
        go."""
        self.replicas: list[Party] = []
        self.ingresses: list[Party] = []
        self._log = log
        self._tiers = tiers
        self._slowness = slowness
        self._health = HealthChecks(world, self._replace_ill)
        self._count = 0

    def start(self) -> None:
        self.start_controller()
        for _ in range(self.args.replicas.count):
            self.start_replica()
        for _ in range(self.args.ingress.count):
            self.start_ingress()

    @property
    def live_replicas(self) -> list[Party]:
        return [party for party in self.replicas if not party.dead]

    @property
    def live_ingresses(self) -> list[Party]:
        return [party for party in self.ingresses if not party.dead]

    def ready(self) -> bool:
        serve = self.serve
        count = len(serve.replicas), len(serve.ingresses)
        wanted = self.args.replicas.count, self.args.ingress.count
        return count == wanted and serve.controller is not None and not any(p.dead for p in serve.replicas)

    def start_controller(self) -> None:
        party = Party("controller", self.world, loop_type=self._log.controller_loop)

        async def run() -> None:
            try:
                party.actor = ControllerActor(
                    self.args.cluster_settings(),
                    self.args.controller.log_settings(),
                    "cluster",
                    partial(self._serve_commits, party),
                    open_log=lambda _log, name, _clock: self._log.open(party, name),
                    clock=party.unix_s,
                    timer=self.world.clock,
                )
            except StoreError:  # the callers create the actor again
                party.die()
                self.world.after(self.random.uniform(*STARTS_S), self.start_controller)
            else:
                party.ready_s = self.world.now_s
                self.serve.controller_is(party)

        party.loop.create_task(run())

    def start_replica(self) -> Party:
        party = self._party("r")
        self.replicas.append(party)
        engine = self.engines[party.name] = EngineFactory(
            party.loop, self.random, self._tiers, self._slowness
        )

        async def make_environment(_args: AppArgs) -> ReplicaEnvironment:
            return ReplicaEnvironment(
                replica_id=party.name,
                controller=self._controller_calls(party),
                listener=SimulatedListener(self.links, party),
                publish_gauges=lambda _stats: None,
                load_text=_load_text,
                clock=self.world.clock,
                unix_clock=party.unix_s,
                settle=lambda: None,
            )

        async def run() -> None:
            party.actor = LLMReplica.__new__(LLMReplica)
            await party.actor.__init__(self.args, engine, make_environment)
            self.serve.add_replica(party)
            self._health.watch(party)

        party.loop.create_task(run())
        return party

    def start_ingress(self) -> None:
        party = self._party("i")
        self.ingresses.append(party)

        async def make_environment(_args: AppArgs) -> IngressEnvironment:
            return IngressEnvironment(
                party.name,
                self._controller_calls(party),
                IngressesHandle(self.serve, party),
                partial(self.links.connect, party),
                self.links.has_died,
                self.random,
                settle=lambda: None,
            )

        async def run() -> None:
            party.actor = Ingress.__new__(Ingress)
            await party.actor.__init__(self.args, None, make_environment)
            party.web = Web(party.actor.service)
            self.serve.add_ingress(party)

        party.loop.create_task(run())

    def crash_controller(self) -> None:
        party = self.serve.controller
        if party is not None:
            self.serve.controller_is(None)
            party.die()
            self.links.party_died(party)
            self.world.after(self.random.uniform(*STARTS_S), self.start_controller)

    def crash_replica(self, party: Party) -> None:
        if party.dead:
            return
        party.die()
        self.links.party_died(party)
        noticed_s = self.random.uniform(*NOTICED_S)

        def replace() -> None:
            self.serve.remove_replica(party)
            if party.retiring:
                return
            self.world.after(self.random.uniform(*STARTS_S), self.start_replica)

        self.world.after(noticed_s, replace)

    def retire_replica(self, party: Party) -> None:
        """Replaces a replica as a rolling update does. The successor starts first. Then the replica is asked to end,
        within a time limit."""
        if party.dead or party.retiring:
            return
        party.retiring = True
        successor = self.start_replica()

        def once_ready() -> None:
            if successor not in self.serve.replicas and not successor.dead:
                self.world.after(SERVE_LOOKS_S, once_ready)
                return
            self.serve.remove_replica(party)
            party.asked_to_go, party.goes_since_s = True, self.world.now_s
            party.loop.create_task(self._stop(party))
            self.world.after(self.args.replicas.graceful_shutdown_timeout_s, partial(self._end, party))

        once_ready()

    def _replace_ill(self, party: Party, why: str) -> None:
        if not party.asked_to_go:
            self.ill.append(f"{party.name} was replaced: {why}")
        self.crash_replica(party)

    async def _stop(self, party: Party) -> None:
        try:
            await party.actor.__del__()
        finally:
            self.world.after(0.0, partial(self._end, party))

    def _end(self, party: Party) -> None:
        party.die()
        self.links.party_died(party)

    def crash_ingress(self, party: Party) -> None:
        if party.dead:
            return
        self.serve.remove_ingress(party)
        self._end(party)
        self.world.after(self.random.uniform(*STARTS_S), self.start_ingress)

    def _controller_calls(self, party: Party) -> ControllerCalls:
        connect: Callable[[], Any] = lambda: ControllerHandle(self.serve, party)  # noqa: E731
        deployment = self.args.deployment("first")
        calls = ShardCalls(connect, timeout_s=CONTROLLER_TIMEOUT_S, deployment=deployment)
        calls._connection = CommitClient(calls._commit_address, party.name)
        calls._connection._connections = SimulatedConnections(self.links, party)
        return ControllerCalls([calls])

    def _serve_commits(self, party: Party, commit: Write) -> CommitServer:
        server = CommitServer(commit, "", party.name)
        server._sockets = SimulatedListener(self.links, party)
        return server

    def _party(self, kind: str) -> Party:
        self._count += 1
        return Party(f"{kind}{self._count}", self.world)


def _load_text(_model: ModelSettings, engine: Engine) -> TextProcessor:
    return TextProcessor(None, vocab_size=engine.vocab_size, max_context_len=engine.max_context_len)
