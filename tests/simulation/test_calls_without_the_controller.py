"""Calls that the controller keeps waiting. Whoever asked gets the documented error."""

from __future__ import annotations

import pytest

from serving.wire.turns import ErrorInfo
from tests.simulation.schedule import UNDISTURBED, Schedule, Turn
from tests.simulation.simulation import Simulation, undisturbed

SETTINGS = tuple((name, 1 if name == "ingresses" else value) for name, value in UNDISTURBED)
"""One front end, which remembers the session's owner."""
SOON_S = 60.0


@pytest.mark.parametrize("seed", range(3))
def test_a_fork_during_an_outage_names_the_controller(seed: int) -> None:
    """Front ends gave the replica up in the moment in which it would have said that the controller does not answer, and
    reported it as unreachable."""
    with undisturbed():
        answer, violations = _forked_in_an_outage(seed)
    assert isinstance(answer, ErrorInfo)
    assert (answer.status, answer.code) == (503, "controller_unavailable")
    assert violations == []


def _forked_in_an_outage(seed: int) -> tuple[object, list[str]]:
    """The client's answer, and what was wrong with the product."""
    simulation = Simulation(Schedule(seed, SETTINGS, (), ()))
    try:
        return _fork_in_an_outage(simulation), simulation.truth.violations
    finally:
        simulation.end()


def _fork_in_an_outage(simulation: Simulation) -> object:
    world, cluster, clients = simulation.world, simulation.cluster, simulation.clients
    cluster.start()
    assert world.run(cluster.ready, SOON_S)
    clients.start((Turn(0.1, 4, 4),), "s")
    assert world.run(lambda: not clients.busy, world.now_s + SOON_S)
    assert cluster.serve.controller is not None
    cluster.serve.controller.loop.freeze()
    asking = clients.party.loop.create_task(clients._ask("web.fork", "s", "child", 0))
    assert world.run(asking.done, world.now_s + SOON_S)
    return asking.result()
