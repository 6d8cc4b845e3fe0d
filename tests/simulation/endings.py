"""What must be left when every session is closed: nothing, in any table of any living party."""

from __future__ import annotations

from collections.abc import Iterator

from serving.front.ingress import Ingress
from serving.replica.replica import LLMReplica
from tests.simulation.network import Party
from tests.simulation.parties import Cluster


def leftovers(cluster: Cluster) -> list[str]:
    """Everything that is left but should not be."""
    left: list[str] = []
    for party in cluster.live_replicas:
        left += [f"{party.name}: {what}" for what in _of_replica(party.actor)]
    for party in cluster.live_ingresses:
        left += [f"{party.name}: {what}" for what in _of_ingress(party.actor)]
    controller = cluster.serve.controller
    if controller is not None:
        known = controller.actor._cluster
        left += [f"ledger: {entry.session_id}" for entry in known.sessions()]
        for party in cluster.live_replicas:
            left += [
                f"stale at {party.name}: {name}" for name in known._ledger.use_of_replica(party.name).stale
            ]
    return left


def _of_replica(replica: LLMReplica) -> Iterator[str]:
    turns, host = replica._parts.turns, replica._parts.host
    tables = {
        "live turns": turns._live,
        "takers of deltas": turns._mailbox._takers,
        "sessions": host._sessions._sessions,
        "sessions being loaded": host._loading._tasks,
        "forks": host._forking._tasks,
        "tasks": replica._tasks._tasks,
    }
    yield from (f"{name}: {list(table)}" for name, table in tables.items() if table)
    if replica._links.calls:
        yield f"calls of front ends: {replica._links.calls}"
    engine = replica._engine
    stats = engine.stats()
    if stats.running or stats.waiting:
        yield f"requests at the engine: {stats.running} run, {stats.waiting} wait"
    if stats.sessions:
        yield f"sessions at the engine: {engine._cache.held_tokens()}"  # type: ignore[attr-defined]


def _of_ingress(ingress: Ingress) -> Iterator[str]:
    if ingress._dispatcher._turns:
        yield f"dispatched turns: {len(ingress._dispatcher._turns)}"
    if ingress._tasks._tasks:
        yield f"tasks: {list(ingress._tasks._tasks)}"
    waiting = [link.replica_id for link in ingress._replicas._links.values() if link.calls]
    if waiting:
        yield f"calls that wait for replicas: {waiting}"


def books(party: Party) -> list[str]:
    """Wrong accounts of a replica whose sessions are closed. After a flush of prefixes all its pages must be free."""
    engine = party.actor._engine
    cache = engine._cache
    cache.flush()
    report = cache.books.audit()
    pages = report.pools["full"]
    wrong = [] if report.clean else [f"{party.name}: {report}"]
    if pages.free != pages.total:
        wrong.append(f"{party.name}: {pages}")
    return wrong
