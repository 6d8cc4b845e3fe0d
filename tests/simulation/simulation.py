"""One run of a schedule: a cluster, its clients and the faults. The result is a list of what was wrong with the
product."""

from __future__ import annotations

import functools
import gc
import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random

from serving.garbage import unsearched
from serving.settings.config import AppArgs, parse_args
from tests.simulation.clients import Clients
from tests.simulation.endings import books, leftovers
from tests.simulation.engine_loop import CONTEXT_LEN
from tests.simulation.expectations import Expectations
from tests.simulation.faults import Faults
from tests.simulation.logs import Log, RedisLog, SqliteLog
from tests.simulation.loop import Spinning, World
from tests.simulation.network import Network, Party
from tests.simulation.operators import Operator
from tests.simulation.parties import Cluster
from tests.simulation.placements import Placements
from tests.simulation.schedule import MAY_CUT_STREAMS, MOVE, PLANNED, Schedule
from tests.simulation.troubles import Troubles
from tests.simulation.truth import Truth
from tests.simulation.views import DetectorWatch, takeovers, wrong_views

START_S = 60.0
PLAY_S = 3600.0
CLOSE_S = 600.0
SETTLE_S = 90.0
"""The sum of the product's longest time limits: an engine that does not confirm an abort, feeds, deadlines of calls."""
CLOSES_S = 300.0
"""A close whose turn was lost happens after its timeout, on a clock that may have been set back by a minute."""
PAGE_SIZE = 4


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a run. `turns` counts the turns that clients were told are done, `steps` the callbacks. `virtual_s`
    is the virtual time of the run."""

    violations: tuple[str, ...]
    turns: int
    committed: int
    steps: int
    virtual_s: float


def run(schedule: Schedule) -> Outcome:
    """Plays a schedule. The same schedule gives the same outcome."""
    simulation = Simulation(schedule)
    with unsearched():  # finalizers would run at times that the seed does not determine
        try:
            return simulation.play()
        finally:
            simulation.end()


class Simulation:
    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        random = Random(f"run {schedule.seed}")
        settings = dict(schedule.settings)
        self.world = World(random)
        self.truth = Truth(self.world.clock)
        network = Network(self.world, random)
        self._log: Log = (
            RedisLog(self.world, network, self.truth) if settings["log"] == "redis" else SqliteLog(self.world)
        )
        self.store = self._log.records
        args = _args(schedule.settings)
        tiers = settings["host_pages"], settings["disk_pages"]
        self.cluster = Cluster(self.world, random, args, network, self._log, tiers, settings["slowness"])
        kinds = {fault.kind for fault in schedule.faults} - {MOVE}
        self._planned = kinds <= set(PLANNED)
        self._no_stream_is_cut = kinds <= set(PLANNED) - MAY_CUT_STREAMS
        limit = min(CONTEXT_LEN, settings["num_pages"] * PAGE_SIZE)
        self.clients = Clients(self.cluster, self.store, self.truth, random, limit, undisturbed=self._planned)
        troubles = Troubles(self.world.clock)
        self.operator = Operator(self.cluster, self.store, self.truth)
        self.faults = Faults(self.cluster, self._log, self.operator, troubles)
        expectations = Expectations(self.cluster, troubles)
        self.watch = DetectorWatch(self.cluster, expectations, self.truth)
        placements = Placements(
            expectations, self.truth, self.operator.asked_to_move, evens_out=settings["rebalancing"]
        )
        self.store.listeners += [self.truth, placements]

    def play(self) -> Outcome:
        try:
            self._play()
        except Spinning as error:
            self.truth.wrong(f"callbacks without end {error}")
        violations = (*self.truth.violations, *self.world.failures)
        committed = sum(len(life.turns) for life in self.store.lives)
        return Outcome(violations, self.truth.turns, committed, self.world.steps, self.world.now_s)

    def end(self) -> None:
        self.world.close()
        self._log.disconnect()

    def _play(self) -> None:
        cluster, world = self.cluster, self.world
        cluster.start()
        if not world.run(cluster.ready, START_S):
            self.truth.wrong("the cluster did not start")
            return
        for ops in self._schedule.clients:
            self.clients.start(ops)
        self.watch.look()
        self.faults.plan(self._schedule.faults)
        if not world.run(self._played, world.now_s + PLAY_S):
            self.truth.wrong("something is stuck")
            return
        self._check_log()
        told_closed = self.clients.told_closed
        if not world.run(lambda: all(life.closed for life in told_closed), world.now_s + CLOSES_S):
            late = [life.session_id for life in told_closed if not life.closed]
            self.truth.wrong(f"told as closed, and the log has them: {late}")
        using = self.clients.party.loop.create_task(self.clients.use_everything())
        if not world.run(using.done, world.now_s + CLOSE_S):
            self.truth.wrong("a turn is stuck, and nothing is wrong any more")
            return
        if not self._calm():
            return
        closing = self.clients.party.loop.create_task(self.clients.close_everything())
        if not world.run(lambda: closing.done() and cluster.ready(), world.now_s + CLOSE_S):
            self.truth.wrong(f"sessions that cannot be closed: {list(self.store.living)}")
            return
        if not self._drained_are_replaced(but=None):
            return
        if not world.run(lambda: not leftovers(cluster), world.now_s + SETTLE_S):
            for what in leftovers(cluster):
                self.truth.wrong(f"left over: {what}")
        else:
            for party in cluster.live_replicas:
                for what in books(party):
                    self.truth.wrong(what)

    def _calm(self) -> bool:
        """Checks the cluster once it has come to rest. Returns False if it does not come to rest."""
        cluster, world = self.cluster, self.world
        replicas = cluster.serve.replicas
        if not self._drained_are_replaced(but=replicas[0] if len(replicas) == 1 else None):
            return False
        if not world.run(lambda: not wrong_views(cluster), world.now_s + SETTLE_S):
            for what in wrong_views(cluster):
                self.truth.wrong(f"a wrong view: {what}")
            return False
        for what in cluster.ill:
            self.truth.wrong(what)
        if self._no_stream_is_cut and takeovers(cluster):
            self.truth.wrong("a turn went on elsewhere in mid-stream, and all changes were planned")
        return True

    def _drained_are_replaced(self, *, but: Party | None) -> bool:
        """Waits until the drained replicas are replaced. `but` has sessions that no other replica can take."""

        def staying() -> list[str]:
            return [each.name for each in self.operator.drained if not each.dead and each is not but]

        if self.world.run(lambda: not staying() and self.cluster.ready(), self.world.now_s + CLOSE_S):
            return True
        self.truth.wrong(f"told as drained, and not replaced: {staying()}")
        return False

    def _played(self) -> bool:
        return not self.clients.busy and not self.faults.under_way and self.cluster.ready()

    def _check_log(self) -> None:
        """Checks that the log returns what it took."""
        for session_id, life in self.store.living.items():
            tokens, turns = self._log.contents(session_id)
            if tokens != life.history() or turns != len(life.turns):
                self.truth.wrong(f"{session_id}: the log has {tokens}, it took {life.history()}")


@functools.lru_cache(maxsize=256)
def _args(settings: tuple[tuple[str, object], ...]) -> AppArgs:
    values = dict(settings)
    return parse_args(
        {
            "model": {"path": "null", "generation_config": "off"},
            "cache": {
                "page_size": PAGE_SIZE,
                "num_pages": values["num_pages"],
                "host_mib": 0,
                "prefix_cache": values["prefix_cache"],
                "books": "strict" if values["strict"] else "balance",
            },
            "scheduler": {"chunk_size": 32, "max_running": 8},
            "speculation": {"method": "ngram" if values["ngram"] else "off"},
            "replicas": {"count": values["replicas"]},
            "ingress": {"count": values["ingresses"]},
            "controller": {"heartbeat_interval_s": 2.0},
            "sessions": {"sweep_interval_s": 3.0},
            "rebalancing": {"min_gap": 2.0} if values["rebalancing"] else {"enabled": False},
        }
    )


@contextmanager
def undisturbed() -> Iterator[None]:
    """A context for many runs. It silences the product's warnings, of which there are thousands. It also silences
    warnings about coroutines and generators of dead parties, which nobody awaits or closes."""
    unraisable, level = sys.unraisablehook, logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    sys.unraisablehook = lambda _: None
    gc.freeze()  # keeps the modules out of each run's garbage collection
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", message="coroutine .* was never awaited", category=RuntimeWarning
            )
            yield
            gc.collect()
    finally:
        gc.unfreeze()
        sys.unraisablehook = unraisable
        logging.disable(level)
