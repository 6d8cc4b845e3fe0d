"""The network between the parties: messages are copied, take time, overtake each other, get lost, and wait at a cut."""

from __future__ import annotations

import copyreg
import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from random import Random
from types import MappingProxyType
from typing import Any, Protocol

from tests.simulation.loop import PartyLoop, World

SHORTEST_S = 0.0002
LONGEST_S = 0.003
BREAK_S = (0.02, 1.5)
"""After this time an end learns that its connection has broken."""


class OpenCall(Protocol):
    """A call that has not ended, as its two parties see it."""

    def party_died(self, party: Party) -> None: ...

    def is_answered_there(self, party: Party) -> bool: ...


@dataclass(eq=False)
class Party:
    """A process: its name, its loop, the actor that runs there, and the part of it that clients see.

    `unix_offset_s` is the error of its Unix clock. `ready_s`: since when a controller answers, possibly after a wait
    for the log. `asked_to_go`: Serve or an operator wants the replica to go. `goes_since_s`: since when other parties
    can know that the replica goes.
    """

    name: str
    world: World
    unix_offset_s: float = 0.0
    loop_type: type[PartyLoop] = PartyLoop
    actor: Any = None
    web: Any = None
    ready_s: float = 0.0
    died_s: float = 0.0
    retiring: bool = False
    asked_to_go: bool = False
    goes_since_s: float | None = None
    calls: dict[OpenCall, None] = field(default_factory=dict)
    loop: PartyLoop = field(init=False)

    def __post_init__(self) -> None:
        self.loop = self.loop_type(self.world, self.name)

    @property
    def dead(self) -> bool:
        return self.loop.dead

    def unix_s(self) -> float:
        return 1_700_000_000.0 + self.world.now_s + self.unix_offset_s

    def die(self) -> None:
        if self.dead:
            return
        self.died_s = self.world.now_s
        self.loop.die()
        for call in list(self.calls):
            call.party_died(self)
        self.calls.clear()


@dataclass(slots=True)
class Weather:
    """How bad the network is: the shares of messages that are slow, that break their connection, or that are
    repeated."""

    slow: float = 0.02
    slowest_s: float = 0.2
    breaks: float = 0.0
    repeats: float = 0.0


def copied(value: Any) -> bytes:
    """The value as bytes, so that parties share nothing."""
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, pickle.HIGHEST_PROTOCOL)
    pickler.dispatch_table = REDUCERS
    pickler.dump(value)
    return buffer.getvalue()


def _reduced(proxy: MappingProxyType[Any, Any]) -> tuple[Any, ...]:
    return _proxy, (dict(proxy),)


def _proxy(values: dict[Any, Any]) -> MappingProxyType[Any, Any]:
    return MappingProxyType(values)


REDUCERS = {**copyreg.dispatch_table, MappingProxyType: _reduced}
"""Ray's pickle can handle this type too."""


class Network:
    """The network of a run. A cut holds messages until it is mended. Then half of them arrive; the others break their
    connection."""

    def __init__(self, world: World, random: Random) -> None:
        self.weather = Weather()
        self.world = world
        self._random = random
        self._cuts: list[frozenset[str]] = []
        self._held: list[tuple[frozenset[str], Callable[[], None], Callable[[], None]]] = []

    def cut(self, one: str, other: str) -> Callable[[], None]:
        """Cuts two parties off from each other. Returns what mends the cut. A name may belong to a party that comes
        later."""
        link = frozenset((one, other))
        self._cuts.append(link)

        def mend() -> None:
            self._cuts.remove(link)
            if link in self._cuts:
                return
            held = [each for each in self._held if each[0] == link]
            self._held = [each for each in self._held if each[0] != link]
            for _, arrive, broken in held:
                self.world.after(self.delay_s(), broken if self._random.random() < 0.5 else arrive)

        return mend

    def send(
        self,
        source: Party,
        target: Party,
        act: Callable[[], None],
        broken: Callable[[], None],
        *,
        not_before_s: float = 0.0,
    ) -> float:
        """Runs `act` on the target's loop when the message arrives. If the connection breaks, runs `broken` instead,
        outside of all loops. Returns the time of arrival, so that a stream can keep its order."""
        there = partial(target.loop.call_soon, act)
        return self.carry(source, target, there, broken, not_before_s=not_before_s)

    def carry(
        self,
        source: Party,
        target: Party,
        act: Callable[[], Any],
        broken: Callable[[], None],
        *,
        not_before_s: float = 0.0,
    ) -> float:
        """Like `send`, but `act` runs outside of all loops, so the target need not run."""
        if source.dead:
            return self.world.now_s
        if self._random.random() < self.weather.breaks:
            self.world.after(self.break_s(), broken)
            return self.world.now_s
        arrival_s = max(self.world.now_s + self.delay_s(), not_before_s)

        def arrive() -> None:
            if target.dead:
                self.world.after(self.break_s(), broken)
            elif self._cuts and (link := frozenset((source.name, target.name))) in self._cuts:
                self._held.append((link, arrive, broken))
            else:
                act()

        self.world.after(arrival_s - self.world.now_s, arrive)
        return arrival_s

    def delay_s(self) -> float:
        random = self._random
        if random.random() < self.weather.slow:
            return random.uniform(LONGEST_S, self.weather.slowest_s)
        return random.uniform(SHORTEST_S, LONGEST_S)

    def break_s(self) -> float:
        return self._random.uniform(*BREAK_S)

    def chance(self, share: float) -> bool:
        return self._random.random() < share
