"""Carries faults out on the cluster and mends them."""

from __future__ import annotations

from collections.abc import Callable

from tests.simulation.logs import Log
from tests.simulation.network import Party, Weather
from tests.simulation.operators import Operator
from tests.simulation.parties import Cluster
from tests.simulation.schedule import Fault
from tests.simulation.troubles import EVERYBODY, Troubles

TOO_LONG_FROZEN_S = 12.0
"""Serve's health check gives up a replica that has not answered for this long."""
BREAK_S = (0.0, 0.3)
"""After this time an end of a connection learns that it has broken, often before the turns end whose events the
connection carried."""
BREAKS_AGAIN_S = (0.1, 1.0)


CONTROLLER_AWAY_S = 5.0
"""Within this time a controller that died has been restarted and has heard from every replica."""


class Faults:
    """`under_way` counts the faults that have not been mended yet. `troubles` notes those that excuse an effect."""

    def __init__(self, cluster: Cluster, log: Log, operator: Operator, troubles: Troubles) -> None:
        self.under_way = 0
        self._cluster = cluster
        self._log = log
        self._operator = operator
        self._troubles = troubles

    def plan(self, faults: tuple[Fault, ...]) -> None:
        for fault in faults:
            self.under_way += 1
            self._cluster.world.after(fault.at_s, lambda fault=fault: self._begin(fault))

    def _begin(self, fault: Fault) -> None:
        mend = self._act(fault)

        def end() -> None:
            mend()
            self.under_way -= 1

        self._cluster.world.after(fault.lasts_s, end)

    def _act(self, fault: Fault) -> Callable[[], None]:
        match fault.kind.split(" ")[0]:
            case "kill":
                return self._kill(fault)
            case "retire":
                return self._retire(fault)
            case "drain":
                return self._drain(fault)
            case "move":
                self._operator.move(fault.who, fault.amount)
                return _nothing
            case "disk":
                return self._disk_fails(fault)
            case "freeze":
                return self._freeze(fault)
            case "cut":
                return self._cut(fault)
            case "break":
                return self._break_connections(fault)
            case "stall":
                return self._stall(fault)
            case "log":
                self._troubles.note(fault.kind, [EVERYBODY], fault.lasts_s)
                return self._log.freeze() if fault.kind == "log frozen" else self._log.stop()
            case "clock":
                return self._clock_step(fault)
            case _:
                return self._bad_weather(fault)

    def _kill(self, fault: Fault) -> Callable[[], None]:
        cluster, party = self._cluster, self._party(fault)
        if party is not None:
            end: Callable[[], None] = {
                "replica": lambda: cluster.crash_replica(party),
                "ingress": lambda: cluster.crash_ingress(party),
                "controller": lambda: self._crash_controller(party),
            }[fault.kind.split(" ")[1]]
            party.loop.doom(fault.steps, end)
            self._troubles.note(fault.kind, [party.name], CONTROLLER_AWAY_S)
        return _nothing

    def _retire(self, fault: Fault) -> Callable[[], None]:
        party = self._party(fault)
        if party is not None and party in self._cluster.serve.replicas:
            self._cluster.retire_replica(party)
        return _nothing

    def _drain(self, fault: Fault) -> Callable[[], None]:
        party = self._party(fault)
        if party is not None and party in self._cluster.serve.replicas:
            self._operator.drain(party)
        return _nothing

    def _disk_fails(self, fault: Fault) -> Callable[[], None]:
        party = self._one("replica", fault.who)
        driver = None if party is None else self._cluster.engines[party.name].driver
        if driver is None:
            return _nothing
        driver.disk_fails = True

        def mend() -> None:
            driver.disk_fails = False

        return mend

    def _crash_controller(self, party: Party) -> None:
        if self._cluster.serve.controller is party:
            self._cluster.crash_controller()

    def _freeze(self, fault: Fault) -> Callable[[], None]:
        party = self._party(fault)
        if party is None:
            return _nothing
        party.loop.freeze()
        self._troubles.note(fault.kind, [party.name], fault.lasts_s)
        if fault.lasts_s > TOO_LONG_FROZEN_S and fault.kind == "freeze replica":
            self._cluster.world.after(TOO_LONG_FROZEN_S, lambda: self._cluster.crash_replica(party))
        return party.loop.thaw

    def _cut(self, fault: Fault) -> Callable[[], None]:
        if fault.kind == "cut controller from log":
            self._troubles.note(fault.kind, [EVERYBODY], fault.lasts_s)
            return self._cluster.network.cut("controller", "redis")
        names = []
        for kind in (fault.kind.split(" ")[1], fault.kind.split(" ")[3]):
            party = self._one(kind, fault.who)
            if party is None:
                return _nothing
            names.append(party.name)
        self._troubles.note(fault.kind, names, fault.lasts_s)
        return self._cluster.network.cut(*names)

    def _break_connections(self, fault: Fault) -> Callable[[], None]:
        """Breaks the connection of an ingress to a replica again and again."""
        cluster, random = self._cluster, self._cluster.random
        ingress, replica = self._one("ingress", fault.who), self._one("replica", fault.who // 2)
        if ingress is None or replica is None:
            return _nothing
        mended = False

        def break_off() -> None:
            if mended:
                return
            for wire in list(cluster.links.between(ingress, replica)):
                wire.break_off((random.uniform(*BREAK_S), random.uniform(*BREAK_S)))
            cluster.world.after(random.uniform(*BREAKS_AGAIN_S), break_off)

        def mend() -> None:
            nonlocal mended
            mended = True

        break_off()
        return mend

    def _stall(self, fault: Fault) -> Callable[[], None]:
        party = self._one("replica", fault.who)
        driver = None if party is None else self._cluster.engines[party.name].driver
        if driver is not None:
            driver.stall(fault.lasts_s)
        return _nothing

    def _clock_step(self, fault: Fault) -> Callable[[], None]:
        party = self._one(("controller", "replica")[fault.who % 2], fault.who)
        if party is not None:
            party.unix_offset_s += fault.amount * 60.0
        return _nothing

    def _bad_weather(self, fault: Fault) -> Callable[[], None]:
        network, fair = self._cluster.network, Weather()
        self._troubles.note(fault.kind, [EVERYBODY], fault.lasts_s)
        if fault.kind == "storm":
            network.weather = Weather(slow=0.3, slowest_s=1.0, breaks=0.03, repeats=0.05)
        else:
            network.weather = Weather(repeats=0.3)

        def clear() -> None:
            network.weather = fair

        return clear

    def _party(self, fault: Fault) -> Party | None:
        return self._one(fault.kind.split(" ")[1], fault.who)

    def _one(self, kind: str, who: int) -> Party | None:
        cluster = self._cluster
        if kind == "controller":
            return cluster.serve.controller
        some = cluster.live_replicas if kind == "replica" else cluster.live_ingresses
        return some[who % len(some)] if some else None


def _nothing() -> None:
    pass
