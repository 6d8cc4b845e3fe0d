"""The connections of front ends to replicas, and of replicas to the controller, as ZeroMQ gives them: in order until
they break, then opened again.

When a connection breaks, messages on their way are lost. So are those that an end sends before it learns of the break.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from random import Random

from controllers.records import ReplicaAddress, SocketAddress
from serving.wire.connections import ConnectionEvents
from serving.wire.peer_sockets import Peer, TakeFrame
from tests.simulation.network import Network, Party

RECONNECTS_S = (0.02, 0.5)
"""The pause between two tries to connect."""
DEATH_KNOWN_S = (0.05, 0.5)
"""Ray knows after this time that a process has ended."""


class Way:
    """One direction of a connection. Messages that arrive early wait for those before them."""

    def __init__(self, network: Network, source: Party, target: Party, broken: Callable[[], None]) -> None:
        self._network = network
        self._source = source
        self._target = target
        self._broken = broken
        self._numbers = itertools.count()
        self._next = 0
        self._early: dict[int, Callable[[], None]] = {}

    def send(self, arrive: Callable[[], None]) -> None:
        number = next(self._numbers)

        def carried() -> None:
            self._early[number] = arrive
            while (ready := self._early.pop(self._next, None)) is not None:
                self._next += 1
                self._target.loop.call_soon(ready)

        self._network.carry(self._source, self._target, carried, self._broken)


class Wire:
    """One connection, until it breaks. `replica_knows`: whether the replica has learned of the break."""

    def __init__(self, links: Links, connection: SimulatedConnection, listener: SimulatedListener) -> None:
        self.connection = connection
        self.listener = listener
        self.open = True
        self.replica_knows = False
        self._links = links
        front, replica = connection.party, listener.party
        self._to_replica = Way(links.network, front, replica, self.break_off)
        self._to_front = Way(links.network, replica, front, self.break_off)

    def to_replica(self, header: bytes, body: bytes) -> None:
        if self.open:
            self._to_replica.send(partial(self._arrive, self.listener.frame_came, header, body))

    def to_front(self, header: bytes, body: bytes) -> None:
        if self.open:
            self._to_front.send(partial(self._arrive, self.connection.frame_came, header, body))

    def break_off(self, after_s: tuple[float, float] | None = None) -> None:
        """Breaks the connection. Front end and replica learn of it after the two times of `after_s`, or random ones."""
        if not self.open:
            return
        self.open = False
        world, network = self._links.world, self._links.network
        front_s, replica_s = after_s or (network.break_s(), network.break_s())
        world.after(front_s, partial(self.connection.learn, self))
        world.after(replica_s, partial(setattr, self, "replica_knows", True))

    def _arrive(self, take: Callable[[Wire, bytes, bytes], None], header: bytes, body: bytes) -> None:
        if self.open:
            take(self, header, body)


class SimulatedListener:
    """A replica's sockets (Listener). It knows only a front end's newest connection."""

    def __init__(self, links: Links, party: Party) -> None:
        self.party = party
        self._links = links
        self._wires: dict[Peer, Wire] = {}
        self._take: TakeFrame | None = None
        links.listeners[party.name] = self

    def open(self, frame_came: TakeFrame) -> ReplicaAddress:
        self._take = frame_came
        name = self.party.name
        return ReplicaAddress(name, name, name, "", name, "")

    @property
    def answers(self) -> bool:
        return self._take is not None and not self.party.dead

    async def close(self) -> None:
        self._take = None

    def frame_came(self, wire: Wire, header: bytes, body: bytes) -> None:
        peer = (0, wire.connection.name)
        self._wires[peer] = wire
        if self._take is not None:
            self._take(peer, header, body)

    def send(self, peer: Peer, header: bytes, body: bytes) -> bool:
        wire = self._wires[peer]
        if wire.replica_knows:
            return False
        wire.to_front(header, body)
        return True


class SimulatedConnection:
    """A front end's connection to one replica (Connection)."""

    def __init__(
        self, links: Links, party: Party, listener: SimulatedListener, events: ConnectionEvents, name: bytes
    ) -> None:
        self.party = party
        self.name = name
        self._links = links
        self._listener = listener
        self._events = events
        self._wire: Wire | None = None
        self._unsent: list[tuple[bytes, bytes]] = []
        self._closed = False
        self._connect()

    def send(self, header: bytes, body: bytes) -> None:
        """Sends a frame. Keeps it while there is no connection, as ZeroMQ does."""
        if self._wire is None:
            self._unsent.append((header, body))
        else:
            self._wire.to_replica(header, body)

    def renew(self) -> None:
        if self._wire is not None:
            self._wire.break_off()
        self._wire = None
        self._unsent.clear()
        self._connect()

    def close(self) -> None:
        self._closed = True
        if self._wire is not None:
            self._wire.break_off()

    def frame_came(self, wire: Wire, header: bytes, body: bytes) -> None:
        if wire is self._wire and not self._closed:
            self._events.frame_came(header, body)

    def learn(self, wire: Wire) -> None:
        """Learns that the connection has broken."""
        if wire is self._wire and not self._closed and not self.party.dead:
            self._wire = None
            self.party.loop.call_soon(self._events.broke)
            self._connect()

    @property
    def wire(self) -> Wire | None:
        return self._wire

    def _connect(self) -> None:
        links = self._links

        def connect() -> None:
            if self._closed or self._wire is not None or self.party.dead:
                return
            if not self._listener.answers:
                links.world.after(links.random.uniform(*RECONNECTS_S), connect)
                return
            self._wire = Wire(links, self, self._listener)
            links.wires.append(self._wire)
            self.party.loop.call_soon(self._events.connected)
            unsent, self._unsent = self._unsent, []
            for frame in unsent:
                self._wire.to_replica(*frame)

        links.network.carry(
            self.party,
            self._listener.party,
            connect,
            lambda: links.world.after(links.random.uniform(*RECONNECTS_S), connect),
        )


class SimulatedConnections:
    """What opens connections of one party (ConnectionFactory)."""

    def __init__(self, links: Links, party: Party) -> None:
        self._links = links
        self._party = party

    def open(self, address: SocketAddress, events: ConnectionEvents) -> SimulatedConnection:
        return self._links.connect(self._party, address, events)

    def close(self) -> None:
        """Each connection is closed by itself."""


class Links:
    """All connections."""

    def __init__(self, network: Network, random: Random) -> None:
        self.network = network
        self.world = network.world
        self.random = random
        self.listeners: dict[str, SimulatedListener] = {}
        self.wires: list[Wire] = []
        self._names = (b"%d" % number for number in itertools.count())

    def connect(self, party: Party, address: SocketAddress, events: ConnectionEvents) -> SimulatedConnection:
        """A new connection from this party to the one that listens at that address."""
        return SimulatedConnection(self, party, self.listeners[address.node_id], events, next(self._names))

    async def has_died(self, address: ReplicaAddress) -> bool:
        """Whether the replica has died, as far as Ray knows."""
        party = self.listeners[address.actor].party
        return party.dead and self.world.now_s - party.died_s > self.random.uniform(*DEATH_KNOWN_S)

    def between(self, front_end: Party, replica: Party) -> Iterator[Wire]:
        """The open connections between the two."""
        self.wires = [wire for wire in self.wires if wire.open]
        for wire in self.wires:
            if wire.connection.party is front_end and wire.listener.party is replica:
                yield wire

    def party_died(self, party: Party) -> None:
        for wire in self.wires:
            if party in (wire.connection.party, wire.listener.party):
                wire.break_off()
