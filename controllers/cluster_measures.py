"""The controller's figures for ledger, replicas and log. Their names are those of serving/watch/definitions.py."""

from __future__ import annotations

from collections.abc import Iterator

from controllers.cluster_stats import ClusterStats
from controllers.histogram import Measure
from controllers.ownership import OwnershipLedger
from controllers.records import ReplicaStatus
from controllers.replicas import ReplicaDirectory, ReplicaState


def _session_figures(ledger: OwnershipLedger, replicas: ReplicaDirectory) -> dict[str, float]:
    """Gauges of sessions and replicas, without labels."""
    present = [status.replica_id for status in replicas.present()]
    owned = sum(map(ledger.count_of, present))
    uses = [ledger.use_of_replica(replica_id) for replica_id in present]
    in_turn = sum(use.in_turn for use in uses)
    return {
        "sessions_in_turn": float(in_turn),
        "sessions_idle": float(owned - in_turn),
        "sessions_unowned": float(len(ledger) - owned),
        "session_tokens": float(ledger.tokens),
        "session_size_bytes": float(sum(use.size_bytes for use in uses)),
        **{
            f"replicas_{state.value}": float(len(replicas.in_state(state)))
            for state in ReplicaState
            if state is not ReplicaState.GONE
        },
    }


def measures(ledger: OwnershipLedger, replicas: ReplicaDirectory, stats: ClusterStats) -> Iterator[Measure]:
    """All measures of the controller. O(replicas), not O(sessions)."""
    for name, value in _session_figures(ledger, replicas).items():
        yield Measure(f"controller_{name}", value)
    for status in replicas.present():
        label = ("replica", status.replica_id)
        age_s = replicas.silence_s(status.replica_id)
        yield Measure("controller_heartbeat_age_seconds", age_s, (label,))
        for kind, count in _orphans(ledger, status).items():
            yield Measure("controller_orphaned_sessions", float(count), (label, ("kind", kind)))
    yield from stats.measures()


def _orphans(ledger: OwnershipLedger, status: ReplicaStatus) -> dict[str, int]:
    """Numbers of sessions on which a replica and the ledger disagree, as of its last heartbeat.

    "stale": the replica does not own them, and has not dropped them although the reply to the heartbeat before told it
    to. (Where sessions end all the time, some have always ended since the last heartbeat.) "missing": the ledger counts
    them as held, but the replica does not hold them. "untold": the replica holds them but has not reported them."""
    use = ledger.use_of_replica(status.replica_id)
    held = use.held + len(use.stale)
    told = held if status.held is None else status.held
    return {
        "stale": use.overdue,
        "missing": max(0, held - told),
        "untold": max(0, told - held),
    }
