"""How long the event loops of a served cluster's processes stood still. A probe is sent into each of its actors.

A loop that stands still serves nobody. The probe is a task on each loop of the process that sleeps BEAT_S and notes how
late it wakes. The product itself contains no part of it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray import cloudpickle

BEAT_S = 0.002
CALL_TIMEOUT_S = 20.0
PARTS = {"SERVE_REPLICA::kedge#Ingress": "front end", "SERVE_REPLICA::kedge#LLMReplica": "replica"}
PROXY = "SERVE_PROXY_ACTOR"


@dataclass(frozen=True, slots=True)
class Stall:
    """The longest stall of a part's loops. `late_s`: how long the loop served nothing. `busy_s`: CPU that all threads
    of the process used meanwhile. For the rest of `late_s` the machine had no core for the process."""

    late_s: float
    busy_s: float
    loop_s: float
    """CPU that the loop's own thread used meanwhile."""

    @property
    def own_s(self) -> float:
        """The part of the stall that the process itself caused."""
        return min(self.late_s, self.busy_s)


class LoopProbe:
    """Probes the actors of application `kedge`, Ray's proxy and the actor named `controller`, in one Ray cluster."""

    def __init__(self, address: str, controller: str) -> None:
        cloudpickle.register_pickle_by_value(sys.modules[__name__])
        ray.init(address=address, namespace="serve", log_to_driver=False, logging_level="ERROR")
        self._actors = dict(_actors(controller))
        self._ask(_start)

    @property
    def parts(self) -> set[str]:
        return {part for part, _ in self._actors.values()}

    def longest(self) -> dict[str, Stall]:
        """The longest stall of each part since the last call."""
        found: dict[str, Stall] = {}
        for part, stalls in self._ask(_taken):
            for stall in stalls:
                found[part] = max(
                    found.get(part, Stall(0.0, 0.0, 0.0)), Stall(*stall), key=lambda each: each.own_s
                )
        return found

    def _ask(self, work: Callable[[Any], Any]) -> list[tuple[str, Any]]:
        asked = [(part, actor.__ray_call__.remote(work)) for part, actor in self._actors.values()]
        return [(part, ray.get(answer, timeout=CALL_TIMEOUT_S)) for part, answer in asked]


def _actors(controller: str) -> Mapping[str, tuple[str, Any]]:
    found = {}
    for listed in ray.util.list_named_actors(all_namespaces=True):
        name = listed["name"]
        part = next((part for begin, part in PARTS.items() if name.startswith(begin)), None)
        if name == controller:
            part = "controller"
        elif name.startswith(PROXY):
            part = "Ray's proxy"
        if part is not None:
            found[name] = part, ray.get_actor(name, listed["namespace"])
    return found


def _start(_: Any) -> None:
    """Runs in the actor's process: starts a task on every loop that runs there."""
    import asyncio
    import gc
    import time
    import types

    state: Any = types.ModuleType("kedge_loop_probe")
    state.stalls, state.tasks = [], []
    sys.modules["kedge_loop_probe"] = state

    async def beat(longest: list[float]) -> None:
        while True:
            began_s, busy_s, loop_s = time.perf_counter(), time.process_time(), time.thread_time()
            await asyncio.sleep(BEAT_S)
            late_s = time.perf_counter() - began_s - BEAT_S
            busy_s, loop_s = time.process_time() - busy_s, time.thread_time() - loop_s
            if min(late_s, busy_s) > min(longest[:2]):
                longest[:] = [late_s, busy_s, loop_s]

    def begin(loop: asyncio.AbstractEventLoop) -> None:
        longest = [0.0, 0.0, 0.0]
        state.stalls.append(longest)
        state.tasks.append(loop.create_task(beat(longest)))

    gc.unfreeze()  # the tasks of an idle process began before it froze what stays
    tasks = [each for each in gc.get_objects() if issubclass(type(each), asyncio.Task)]
    gc.freeze()
    loops = [loop for loop in {task.get_loop() for task in tasks} if loop.is_running()]
    assert loops, "no event loop was found"
    for loop in loops:
        loop.call_soon_threadsafe(begin, loop)


def _taken(_: Any) -> list[tuple[float, ...]]:
    state: Any = sys.modules["kedge_loop_probe"]
    stalls = [tuple(longest) for longest in state.stalls]
    for longest in state.stalls:
        longest[:] = [0.0, 0.0, 0.0]
    return stalls
