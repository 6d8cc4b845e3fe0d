"""A model of Ray and Ray Serve as far as Kedge uses them: the running processes, the handle of the ingresses, and a
controller actor that is restarted. The parties themselves are the product's own classes (parties.py)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random
from typing import Any

from ray import cloudpickle

from controllers.cluster_actor import ClusterController
from tests.simulation.calls import Call, unavailable
from tests.simulation.network import Network, Party


class ServeModel:
    """The running processes, as Serve knows them."""

    def __init__(self, network: Network, random: Random) -> None:
        self.network = network
        self.random = random
        self.replicas: list[Party] = []
        self.ingresses: list[Party] = []
        self.controller: Party | None = None
        self._wait_for_controller: list[Callable[[Party], None]] = []

    def add_ingress(self, ingress: Party) -> None:
        """The ingress is ready."""
        self.ingresses.append(ingress)

    def remove_ingress(self, ingress: Party) -> None:
        if ingress in self.ingresses:
            self.ingresses.remove(ingress)

    def add_replica(self, replica: Party) -> None:
        """The replica is ready."""
        self.replicas.append(replica)

    def remove_replica(self, replica: Party) -> None:
        if replica in self.replicas:
            self.replicas.remove(replica)

    def controller_is(self, controller: Party | None) -> None:
        self.controller = controller
        if controller is not None:
            waiting, self._wait_for_controller = self._wait_for_controller, []
            for act in waiting:
                act(controller)

    def with_controller(self, act: Callable[[Party], None]) -> None:
        """Calls `act` with the controller: now, or once the actor has been restarted."""
        if self.controller is not None:
            act(self.controller)
        else:
            self._wait_for_controller.append(act)


class IngressesHandle:
    """The handle of the ingresses that an ingress itself has."""

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
    """The handle of the controller's detached actor. Ray may send a call again to the actor that replaces a dead
    one."""

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
    """Runs a function in the actor's process. The actor need not know the function."""

    def __init__(self, serve: ServeModel, caller: Party) -> None:
        self._method = ControllerMethod(serve, caller, RUN_FUNCTION)

    def remote(self, *, fn: Callable[[Any], Any]) -> ControllerCall:
        return self._method.remote(cloudpickle.dumps(fn))


class ControllerActor(ClusterController):
    """The controller with the method that Ray adds to an actor's class."""

    async def run_function(self, pickled: bytes) -> Any:
        return cloudpickle.loads(pickled)(self)


RUN_FUNCTION = ControllerActor.run_function.__name__


class ControllerCall(Call):
    def __init__(self, serve: ServeModel, caller: Party, method: str, args: tuple[Any, ...]) -> None:
        super().__init__(serve.network, caller, f"actor.{method}", args)
        self._serve = serve

    def find(self) -> None:
        """Sends the call. If the actor is being restarted, Ray waits for it or says at once that there is none."""
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
