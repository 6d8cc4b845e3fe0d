"""Each alert fires on a real Prometheus and a live cluster: a test causes the fault, sees the alert, repairs the fault.

Durations in the rules are divided by FASTER; thresholds stay as shipped. Alerts that must not fire are watched with
rules whose durations are divided by CALMER, which is less, because a restart cannot be made faster. With LOSSES, one
replica may be lost after another within the window of an alert, and the effect of one loss still ends before it fires.
With MOVES, 50 sessions can have turns within a window.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import httpx
import pytest
from frozen_process import frozen
from live_prometheus import FASTER, LivePrometheus, installed
from null_app import HOLD
from served_cluster import ServedCluster, eventually
from session_client import Conversation, random_tokens
from watched_cluster import FAULTS, clients, session_of_two_turns, short_stream, stream, watched

pytestmark = pytest.mark.skipif(not installed(), reason="prometheus is not installed (Debian's package)")

CALMER, LOSSES, MOVES = 8.0, 20.0, 12.0
LABELS = {"cluster": "tested", "hurry": f"{FASTER:g}"}
CALM_LABELS = {"cluster": "tested", "hurry": f"{CALMER:g}"}
LOSSES_LABELS = {"cluster": "tested", "hurry": f"{LOSSES:g}"}
MOVES_LABELS = {"cluster": "tested", "hurry": f"{MOVES:g}"}
GAP_S = 1.5
MOST_LOSSES = 10
"""A loss takes five seconds or more, and a burst is told after 18."""


@pytest.fixture(scope="module")
def cluster(shared_cluster: ServedCluster) -> ServedCluster:
    shared_cluster.use(watched)
    return shared_cluster


@pytest.fixture(scope="module")
def prometheus(cluster: ServedCluster) -> Iterator[LivePrometheus]:
    live = LivePrometheus(cluster.port, (FASTER, CALMER))
    try:
        live.start()
        yield live
    finally:
        live.stop()


@pytest.fixture(autouse=True)
def mended(cluster: ServedCluster) -> Iterator[None]:
    yield
    with cluster.client() as client:
        client.delete(FAULTS)


def plant(cluster: ServedCluster, kind: str, **fields: Any) -> dict[str, Any]:
    with cluster.client() as client:
        reply = client.post(FAULTS, json={"kind": kind, **fields})
        assert reply.status_code == 200, reply.text
        return dict(reply.json())


def mend(cluster: ServedCluster) -> None:
    with cluster.client() as client:
        assert client.delete(FAULTS).status_code == 200


def idle_sessions(client: httpx.Client, count: int) -> list[Conversation]:
    sessions = [Conversation.open(client) for _ in range(count)]
    for number, session in enumerate(sessions):
        session.turn([300 + number] * 20)
    return sessions


def session_left_behind(client: httpx.Client, rng: Any) -> int:
    opened = client.post("/open_session", json={"capacity_of_str_len": 100_000, "timeout": 20})
    return stream(client, random_tokens(rng, 200), 2, opened.json()) if opened.status_code == 200 else 0


def test_a_quiet_hour_fires_nothing_but_what_it_should(
    cluster: ServedCluster, prometheus: LivePrometheus
) -> None:
    """Runs first. Mixed load, a rolling update, a gap in the scrapes, and a killed replica, the only thing that is
    reported."""
    began_s = time.monotonic()

    def fewer_pages(document: dict[str, Any]) -> None:
        document["applications"][0]["args"]["cache"].update(num_pages=280)

    with clients(cluster, 3, session_of_two_turns, 0.05) as told, clients(cluster, 3, short_stream, 0.05):
        before = set(cluster.replicas())
        cluster.deploy(fewer_pages)
        eventually(lambda: len(cluster.replicas()) == 2 and not before & set(cluster.replicas()), 180.0)
        prometheus.reach(False)
        threading.Event().wait(GAP_S)
        prometheus.reach()
        cluster.kill(next(iter(cluster.replicas().values()))["pid"])
        eventually(lambda: len(cluster.replicas()) == 2, 120.0)
        prometheus.fires("KedgeReplicaLost", **CALM_LABELS)
    assert told[200]
    took_s = round(time.monotonic() - began_s)
    assert prometheus.fired_within(f"{took_s}s", hurry=CALM_LABELS["hurry"]) == {"KedgeReplicaLost"}


def test_late_first_tokens_use_up_the_budget(cluster: ServedCluster, prometheus: LivePrometheus) -> None:
    """Runs early, while the windows contain few good first tokens."""

    def one_token(client: httpx.Client, rng: Any) -> int:
        return stream(client, random_tokens(rng, 5), 1)

    for replica in cluster.replicas():
        plant(cluster, "slow_steps", replica_id=replica, delay_s=2.2, for_s=120)
    with clients(cluster, 24, one_token):
        fired = prometheus.fires("KedgeSlowFirstToken", 90.0, severity="page", **LABELS)
        assert fired["annotations"]["runbook_url"] == "docs/runbooks.md#kedgeslowfirsttoken"
        mend(cluster)
        prometheus.resolves("KedgeSlowFirstToken", **LABELS)


def test_a_leak_pages_and_the_audit_names_page_session_and_operation(
    cluster: ServedCluster, prometheus: LivePrometheus
) -> None:
    with cluster.client() as client:
        sessions = idle_sessions(client, 4)
        leaky, other = sorted(cluster.replicas())
        leak = plant(cluster, "leak_page", replica_id=leaky)
        with clients(cluster, 3, short_stream, 0.2) as told:
            fired = prometheus.fires(
                "KedgeLeakedPages", severity="page", replica=leaky, pool="full", **LABELS
            )
            assert fired["value"] == "1e+00"
        assert set(told) == {200}, "it costs memory, and no turn"
        twice = plant(cluster, "double_count", replica_id=other)
        lost = plant(cluster, "lose_session", replica_id=other)
        prometheus.fires("KedgeLeakedPages", replica=other, **LABELS)
        audit = client.get("/v1/kedge/audit").json()
        found = {each["replica_id"]: each["findings"] for each in audit["replicas"]}
        assert not audit["clean"]
        (finding,) = found[leaky]
        assert (finding["kind"], finding["page"]) == ("leaked", leak["page"])
        assert (finding["last"]["session"], finding["last"]["operation"]) == (leak["session_id"], "allocated")
        assert twice["page"] in {each["page"] for each in found[other] if each["kind"] == "doubly accounted"}
        for replica in (leaky, other):
            prometheus.fires("KedgeAuditFindings", severity="page", replica=replica, **LABELS)
        prometheus.fires("KedgeOrphanedSessions", severity="warning", replica=other, **LABELS)
        mend(cluster)
        for name in ("KedgeLeakedPages", "KedgeAuditFindings", "KedgeOrphanedSessions"):
            prometheus.resolves(name, **LABELS)
        assert client.get("/v1/kedge/audit").json()["clean"]
        assert lost["session_id"] in {session.session_id for session in sessions}
        for session in sessions:
            session.exact_turn([7], resumed=True)
            session.close()


def test_engines_that_stall(cluster: ServedCluster, prometheus: LivePrometheus) -> None:
    stalled, other = sorted(cluster.replicas())
    plant(cluster, "stall_engine", replica_id=stalled, for_s=14)
    with clients(cluster, 8, short_stream, 4.0) as told, cluster.client() as client:
        for number in range(3):
            plant(cluster, "stall_engine", replica_id=other, for_s=8)
            if number == 0:
                client.get("/v1/kedge/audit")  # waits for ten seconds
                prometheus.fires("KedgeAuditFailed", severity="warning", replica=stalled, **LABELS)
                prometheus.fires("KedgeEngineStalled", severity="page", replica=stalled, **LABELS)
            eventually(lambda: cluster.metric("kedge_engine_step_age_seconds", replica=other) < 1)
        prometheus.fires("KedgeLongQueues", severity="warning", **LABELS)
    assert set(told) == {200}, "they wait, and none fails"
    mend(cluster)
    for name in ("KedgeEngineStalled", "KedgeLongQueues", "KedgeAuditFailed"):
        prometheus.resolves(name, **LABELS)


def test_errors_of_ours_and_those_of_clients(cluster: ServedCluster, prometheus: LivePrometheus) -> None:
    def nonsense(client: httpx.Client, _rng: Any) -> int:
        return client.post("/generate", json={"input_ids": "five"}).status_code

    refusing, failing = sorted(cluster.replicas())
    plant(cluster, "refuse_turns", replica_id=refusing, for_s=120)
    plant(cluster, "fail_turns", replica_id=failing, for_s=120)
    with clients(cluster, 4, short_stream, 0.1) as told, clients(cluster, 8, nonsense, 0.02) as refused:
        prometheus.fires("KedgeTurnErrors", severity="page", **LABELS)
        prometheus.fires("KedgeReplicaErrors", severity="page", replica=failing, **LABELS)
        prometheus.fires("KedgeHttpErrors", severity="page", **LABELS)
        prometheus.fires("KedgeOverloaded", severity="warning", **LABELS)
        prometheus.fires("KedgeClientErrors", severity="info", **LABELS)
        assert set(refused) == {400}
        assert {429, 500} <= set(told)
    mend(cluster)
    with clients(cluster, 4, short_stream, 0.02):
        for name in (
            "KedgeReplicaErrors",
            "KedgeTurnErrors",
            "KedgeHttpErrors",
            "KedgeOverloaded",
            "KedgeClientErrors",
        ):
            prometheus.resolves(name, **LABELS)


def test_a_log_that_is_slow_and_one_that_is_away(cluster: ServedCluster, prometheus: LivePrometheus) -> None:
    with clients(cluster, 6, session_of_two_turns) as told:
        plant(cluster, "slow_commits", delay_s=0.8, for_s=120)
        prometheus.fires("KedgeSlowCommits", severity="warning", **LABELS)
        plant(cluster, "fail_commits", for_s=120)
        prometheus.fires("KedgeLogAway", severity="page", **LABELS)
        mend(cluster)
        for name in ("KedgeSlowCommits", "KedgeLogAway"):
            prometheus.resolves(name, **LABELS)
    assert set(told) == {200}, "turns waited, and none failed"


def test_memory_that_is_short(cluster: ServedCluster, prometheus: LivePrometheus) -> None:
    """Load alone causes it: long answers that do not fit side by side, and more idle sessions than the pool has room
    for."""

    def long_answer(client: httpx.Client, rng: Any) -> int:
        return stream(client, random_tokens(rng, 50), 1500)

    with clients(cluster, 3, session_left_behind, 0.05):
        prometheus.fires("KedgeSessionsComputedAnew", severity="warning", **LABELS)
    with clients(cluster, 20, long_answer):
        prometheus.fires("KedgeMemoryShort", severity="warning", **LABELS)
        prometheus.fires("KedgeRetractions", severity="warning", **LABELS)
    for name in ("KedgeSessionsComputedAnew", "KedgeMemoryShort", "KedgeRetractions"):
        prometheus.resolves(name, **LABELS)


def test_replicas_that_are_lost_one_after_another(cluster: ServedCluster, prometheus: LivePrometheus) -> None:
    """To its calls a replica that stands still is lost, like one that has died, and it is back sooner."""
    prometheus.evaluate_too(LOSSES)

    def answer(client: httpx.Client, rng: Any) -> int:
        return stream(client, random_tokens(rng, 5), 200)

    def lost() -> float:
        return cluster.metric("kedge_failovers_total", cause="lost")

    with clients(cluster, 4, answer) as told:
        for victim in islice(cycle(sorted(cluster.replicas())), MOST_LOSSES):
            before = lost()
            with frozen(cluster.replicas()[victim]["pid"]):
                eventually(lambda before=before: lost() > before)
            eventually(lambda: len(cluster.replicas()) == 2)
            if prometheus.firing("KedgeFailoverBurst", **LOSSES_LABELS):
                break
        prometheus.fires("KedgeFailoverBurst", severity="page", **LOSSES_LABELS)
    assert set(told) == {200}


def test_a_replica_that_dies_with_most_sessions(cluster: ServedCluster, prometheus: LivePrometheus) -> None:
    hold = Path(cluster.state_dir) / HOLD
    prometheus.evaluate_too(MOVES)
    with cluster.client() as client:
        sessions = idle_sessions(client, 50)
        replicas = cluster.replicas()
        hold.touch()
        cluster.kill(replicas[max(replicas, key=lambda replica: replicas[replica]["sessions"])]["pid"])
        try:
            prometheus.fires("KedgeReplicaLost", severity="warning", **LABELS)
            for session in sessions:
                session.turn([9], resumed=True)
            prometheus.fires("KedgeOwnershipChurn", severity="warning", **MOVES_LABELS)
            prometheus.fires("KedgeReplicasMissing", severity="page", **LABELS)
        finally:
            hold.unlink()
        eventually(lambda: len(cluster.replicas()) == 2, 120.0)
        for name in ("KedgeReplicasMissing", "KedgeReplicaLost"):
            prometheus.resolves(name, **LABELS)
        for session in sessions:
            session.close()


def test_a_controller_that_is_away_and_a_cluster_that_is(
    cluster: ServedCluster, prometheus: LivePrometheus
) -> None:
    prometheus.scrape_every(4)
    (controller,) = cluster.pids("ray::ClusterController")
    with frozen(controller):
        prometheus.fires("KedgeControllerAway", severity="page", **LABELS)
    prometheus.resolves("KedgeControllerAway", **LABELS)
    prometheus.reach(False)
    prometheus.fires("KedgeDown", severity="page", **LABELS)
    prometheus.reach()
    prometheus.resolves("KedgeDown", **LABELS)


def test_a_disk_that_fails(cluster: ServedCluster, prometheus: LivePrometheus) -> None:
    """The folders with KV are deleted while replicas use them. These replicas have a real model and keep KV on disk."""
    kept = cluster.state_dir / "kv"

    def with_a_disk(document: dict[str, Any]) -> None:
        watched(document)
        application = document["applications"][0]
        application["import_path"] = "serving.app:build"
        application["args"]["cache"].update(num_pages=100, host_mib=8, disk_mib=64, disk_path=str(kept))

    cluster.use(with_a_disk)
    folders = [each for each in kept.iterdir() if each.is_dir()]
    assert len(folders) == 2
    for each in folders:
        shutil.rmtree(each)
    with clients(cluster, 3, session_left_behind, 0.05) as told:
        prometheus.fires("KedgeDiskFailures", severity="warning", **LABELS)
        for each in folders:
            each.mkdir()
        eventually(lambda: cluster.metric("kedge_demotions_total", tier="disk") > 0, 60.0)
        prometheus.resolves("KedgeDiskFailures", **LABELS)
    assert set(told) == {200}
