"""What Ray and Ray Serve are to Kedge, and no more: handles, routers that know replicas late, a controller's actor that
is started again. The parties themselves are the product's own classes (parties.py)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any

from ray import cloudpickle

from controllers.cluster_actor import ClusterController
from serving.wire.routing_errors import ALL_REPLICAS, KnownReplicas, Loss, Members, ReplicaGone
from tests.simulation.calls import Call, Stream, unavailable
from tests.simulation.network import Network, Party

ROUTING_PAUSE_S = 0.05
ROUTER_LAG_S = (0.0, 0.3)


@dataclass(slots=True)
class Routes:
    """What an ingress's router knows, as PinnedRequestRouter: `unlisted` were listed before, and have not died."""

    listed: list[Party]
    unlisted: list[Party] = field(default_factory=list)
    ever_listed: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.ever_listed.update(party.name for party in self.listed)

    def update(self, listed: list[Party]) -> None:
        dropped = [party for party in self.present() if party not in listed]
        self.listed, self.unlisted = list(listed), dropped
        self.ever_listed.update(party.name for party in listed)

    def present(self) -> list[Party]:
        self.unlisted = [party for party in self.unlisted if not party.dead]
        return self.listed + self.unlisted

    def members(self) -> Members:
        self.present()
        return Members(tuple(each.name for each in self.listed), tuple(each.name for each in self.unlisted))


class ServeModel:
    """Who runs, as Serve has it, and as each ingress's router has heard."""

    def __init__(self, network: Network, random: Random) -> None:
        self.network = network
        self.random = random
        self.replicas: list[Party] = []
        self.ingresses: list[Party] = []
        self.controller: Party | None = None
        self._routes: dict[Party, Routes] = {}
        self._wait_for_controller: list[Callable[[Party], None]] = []

    def open_routes(self, ingress: Party) -> None:
        """The router of an ingress that starts."""
        self._routes[ingress] = Routes(list(self.replicas))

    def add_ingress(self, ingress: Party) -> None:
        """It is ready."""
        self.ingresses.append(ingress)

    def remove_ingress(self, ingress: Party) -> None:
        if ingress in self.ingresses:
            self.ingresses.remove(ingress)
        self._routes.pop(ingress, None)

    def list_replica(self, replica: Party) -> None:
        """Each router hears of it in its own time."""
        self.replicas.append(replica)
        self._spread()

    def unlist_replica(self, replica: Party) -> None:
        if replica in self.replicas:
            self.replicas.remove(replica)
            self._spread()

    def ever_listed(self, replica: Party) -> bool:
        """Whether the router of an ingress that is there has listed it."""
        return any(replica.name in routes.ever_listed for routes in self._routes.values())

    def routes_of(self, ingress: Party) -> Routes:
        return self._routes.get(ingress) or Routes([])

    def controller_is(self, controller: Party | None) -> None:
        self.controller = controller
        if controller is not None:
            waiting, self._wait_for_controller = self._wait_for_controller, []
            for act in waiting:
                act(controller)

    def with_controller(self, act: Callable[[Party], None]) -> None:
        """Now, or once the actor has been started again."""
        if self.controller is not None:
            act(self.controller)
        else:
            self._wait_for_controller.append(act)

    def _spread(self) -> None:
        for ingress in self._routes:
            ingress.world.after(self.random.uniform(*ROUTER_LAG_S), partial(self._heard, ingress))

    def _heard(self, ingress: Party) -> None:
        if ingress in self._routes:
            self._routes[ingress].update(self.replicas)


class ReplicasHandle:
    """The deployment handle of the replicas, in one ingress."""

    def __init__(self, serve: ServeModel, caller: Party, **options: Any) -> None:
        self._serve = serve
        self._caller = caller
        self._options = options

    def options(self, **options: Any) -> ReplicasHandle:
        return ReplicasHandle(self._serve, self._caller, **{**self._options, **options})

    def remote(self, *args: Any) -> Call | Stream:
        kind = Stream if self._options.get("stream") else Call
        call = kind(self._serve.network, self._caller, f"actor.{self._options['method_name']}", args)
        self._caller.loop.call_soon(self._route, call)
        return call

    def _route(self, call: Call | Stream) -> None:
        """As PinnedRequestRouter does; with nobody to choose from, Serve waits."""
        routes = self._serve.routes_of(self._caller)
        pin = self._options.get("session_id", "")
        if call.over:
            return
        if not (present := routes.present()):
            self._caller.loop.call_later(ROUTING_PAUSE_S, self._route, call)
        elif pin == ALL_REPLICAS:
            call.fail(KnownReplicas(routes.members()))
        elif not pin:
            call.send(self._serve.random.choice(routes.listed or present))
        else:
            target = next((party for party in present if party.name == pin), None)
            if target is not None and not target.dead:
                call.send(target)
            else:
                call.fail(ReplicaGone(pin, Loss.DIED if pin in routes.ever_listed else Loss.UNKNOWN))


class IngressesHandle:
    """The ingresses' own handle, in one of them."""

    def __init__(self, serve: ServeModel, caller: Party) -> None:
        self._serve = serve
        self._caller = caller

    def broadcast(self, method: str, *args: Any) -> Broadcast:
        calls = []
        for ingress in self._serve.ingresses:
            call = Call(self._serve.network, self._caller, f"actor.{method}", args)
            call.send(ingress)
            calls.append(call)
        return Broadcast(calls)


class Broadcast:
    def __init__(self, calls: list[Call]) -> None:
        self._calls = calls

    async def results_async(self, *, timeout_s: float, return_exceptions: bool) -> list[Any]:
        answers = asyncio.gather(*self._calls, return_exceptions=return_exceptions)
        return await asyncio.wait_for(answers, timeout_s)


class ControllerHandle:
    """The handle of the controller's detached actor: Ray may send a call again to the actor that follows a dead one."""

    def __init__(self, serve: ServeModel, caller: Party) -> None:
        self._serve = serve
        self._caller = caller

    def __getattr__(self, method: str) -> ControllerMethod:
        return ControllerMethod(self._serve, self._caller, method)

    @property
    def __ray_call__(self) -> ControllerFunctionCall:
        return ControllerFunctionCall(self._serve, self._caller)


class ControllerMethod:
    def __init__(self, serve: ServeModel, caller: Party, method: str) -> None:
        self._serve = serve
        self._caller = caller
        self._method = method

    def remote(self, *args: Any) -> ControllerCall:
        call = ControllerCall(self._serve, self._caller, self._method, args)
        call.find()
        return call


class ControllerFunctionCall:
    """Runs a function in the actor's process, which need not know it."""

    def __init__(self, serve: ServeModel, caller: Party) -> None:
        self._method = ControllerMethod(serve, caller, RUN_FUNCTION)

    def remote(self, *, fn: Callable[[Any], Any]) -> ControllerCall:
        return self._method.remote(cloudpickle.dumps(fn))


class ControllerActor(ClusterController):
    """With what Ray adds to an actor's class."""

    async def run_function(self, pickled: bytes) -> Any:
        return cloudpickle.loads(pickled)(self)


RUN_FUNCTION = ControllerActor.run_function.__name__


class ControllerCall(Call):
    def __init__(self, serve: ServeModel, caller: Party, method: str, args: tuple[Any, ...]) -> None:
        super().__init__(serve.network, caller, f"actor.{method}", args)
        self._serve = serve

    def find(self) -> None:
        """Ray waits for an actor that is being started again, or says at once that there is none."""
        if self._serve.controller is None and self._serve.network.chance(0.5):
            self._caller.loop.call_soon(self.fail, unavailable())
        else:
            self._serve.with_controller(self._send_if_wanted)

    def _send_if_wanted(self, controller: Party) -> None:
        if not self.over:
            self.send(controller)

    def _target_died(self) -> None:
        if self._serve.network.chance(0.5):
            self._serve.with_controller(self._send_if_wanted)
        else:
            super()._target_died()
