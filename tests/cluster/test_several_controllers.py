"""A cluster whose sessions three controllers share, each with a log of its own."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from served_cluster import ServedCluster, eventually
from session_client import Conversation, random_tokens

from controllers.shards import shard_of

SHARDS = 3
OWN_NAME = "kedge-controller-of-shards"


def with_shards(document: dict[str, Any]) -> None:
    """Beside the former controller, which keeps its log as long as it lives."""
    (application,) = document["applications"]
    application["args"]["controller"] |= {"name": OWN_NAME, "shards": SHARDS}
    application["args"]["controller"]["state_dir"] += "-of-shards"


@pytest.fixture(scope="module")
def cluster(shared_cluster: ServedCluster) -> ServedCluster:
    shared_cluster.use(with_shards)
    return shared_cluster


@pytest.fixture
def sessions(client: httpx.Client, request: pytest.FixtureRequest) -> Iterator[list[Conversation]]:
    """Sessions of all shards, each with a turn. What they say was in no test before: no KV of it is there. Their names
    are the test's: names drawn by chance left a shard without a session now and then."""
    rng = random.Random(request.node.name)
    opened = [Conversation.open(client, f"{request.node.name}-{number}") for number in range(12)]
    for session in opened:
        session.turn(random_tokens(rng, 20))
    assert {shard_of(session.session_id, SHARDS) for session in opened} == set(range(SHARDS))
    yield opened
    for session in opened:
        session.close()


def test_a_shard_that_is_killed_forgets_nothing_and_holds_up_no_other(
    cluster: ServedCluster, sessions: list[Conversation]
) -> None:
    rng = random.Random(18)
    before = cluster.sessions()
    assert set(before) == {session.session_id for session in sessions}
    for pid in cluster.pids("ray::ClusterController"):
        cluster.kill(pid)
        for session in sessions:
            session.turn(random_tokens(rng, 3))
    after = cluster.sessions()
    for session in sessions:
        told, was = after[session.session_id], before[session.session_id]
        assert (told["replica_id"], told["epoch"]) == (was["replica_id"], was["epoch"])
        assert told["tokens"] == len(session.history)


def test_sessions_of_all_shards_leave_a_replica_that_is_killed(
    cluster: ServedCluster, sessions: list[Conversation]
) -> None:
    rng = random.Random(19)
    before = cluster.sessions()
    victim = before[sessions[0].session_id]["replica_id"]
    cluster.kill(cluster.replicas()[victim]["pid"])
    for session in sessions:
        was = before[session.session_id]
        session.exact_turn(random_tokens(rng, 5), resumed=was["replica_id"] == victim)
        entry = cluster.sessions()[session.session_id]
        assert entry["epoch"] == was["epoch"] + (was["replica_id"] == victim)
    eventually(lambda: len(cluster.replicas()) == 2, 90)
    assert cluster.pages()["leaked"] == 0


def test_a_fork_may_belong_to_another_shard(client: httpx.Client, sessions: list[Conversation]) -> None:
    rng = random.Random(20)
    parent = sessions[0]
    names = [f"fork-{number}" for number in range(6)]
    assert {shard_of(name, SHARDS) for name in names} == set(range(SHARDS))
    for name in names:
        reply = client.post(f"/v1/kedge/sessions/{parent.session_id}/fork", json={"new_session_id": name})
        assert reply.status_code == 200, reply.text
        made = reply.json()
        assert made["cached_tokens"] >= len(parent.history) - 1
        child = Conversation(client, name, list(parent.history))
        child.turn(random_tokens(rng, 4))
        child.close()
    parent.turn(random_tokens(rng, 3))


def test_figures_are_those_of_all_shards(cluster: ServedCluster, sessions: list[Conversation]) -> None:
    def counted() -> bool:
        return cluster.metric("kedge_controller_sessions_idle") == len(sessions)

    eventually(counted)
    for shard in range(SHARDS):
        assert cluster.metric("kedge_controller_replicas_live", shard=str(shard)) == 2
    with cluster.client() as client:
        audit = client.get("/v1/kedge/audit").json()
    assert audit["clean"] is True
