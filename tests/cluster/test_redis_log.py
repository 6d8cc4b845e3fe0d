"""A session log in Redis outlives the cluster. While Redis is away, finished turns wait for it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from served_cluster import ROOT, ServedCluster, eventually
from session_client import Conversation, generate_once

from tests.unit.controllers.redis_server import RedisServer

SESSIONS = 4


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    server = RedisServer("--appendonly", "yes")
    yield server
    server.stop()


@pytest.fixture(scope="module")
def first(server: RedisServer) -> Iterator[ServedCluster]:
    with served(server) as cluster:
        yield cluster


@contextmanager
def served(server: RedisServer) -> Iterator[ServedCluster]:
    def edit(document: dict[str, Any]) -> None:
        document["applications"][0]["import_path"] = "null_app:build"
        args = document["applications"][0]["args"]
        args["replicas"]["count"] = 1
        args["controller"]["redis_url"] = server.url

    cluster = ServedCluster(ROOT / "configs" / "cluster.yaml", edit)
    cluster.start()
    try:
        yield cluster
    finally:
        cluster.stop()


def test_turns_wait_for_a_frozen_redis_and_keep_their_kv(first: ServedCluster, server: RedisServer) -> None:
    """Earlier the turns ended in store_unavailable after two seconds, and their answers were computed again."""
    with first.client() as client, ThreadPoolExecutor(SESSIONS + 1) as pool:
        talks = [Conversation.open(client) for _ in range(SESSIONS)]
        for number, talk in enumerate(talks):
            talk.exact_turn([400 + number, 401])
        server.pause()
        turns = [pool.submit(talk.told_turn, [500, 501], 40, lambda _: None) for talk in talks]
        opening = pool.submit(Conversation.open, client, "later")
        eventually(lambda: first.metric("kedge_commits_pending") == SESSIONS, 60)
        frozen = first.metric("kedge_commit_retries_total") + 8 * SESSIONS
        eventually(lambda: first.metric("kedge_commit_retries_total") > frozen, 60)
        assert not any(turn.done() for turn in [*turns, opening])
        assert len(generate_once(client, [500, 501], 8)) == 8, "what needs no log goes on"
        assert len(first.sessions()) == SESSIONS, "the controller answers"
        server.go_on()
        for turn in turns:
            assert len(turn.result(60)) == 40
        for talk in [*talks, opening.result(60)]:
            talk.exact_turn([600])  # finds the KV of the whole history
            talk.close()
        eventually(lambda: first.metric("kedge_commits_pending") == 0)
        for outcome in ("store_failed", "stale", "error", "unavailable"):
            assert first.metric("kedge_turns_total", outcome=outcome) == 0


def test_a_second_cluster_takes_over_session_by_session(first: ServedCluster, server: RedisServer) -> None:
    """The second cluster runs beside the first, as in a RayService upgrade. Earlier it fenced the first as soon as it
    opened the log. Sessions outlive a cluster that ends."""
    with first.client() as client:
        moving, staying = Conversation.open(client), Conversation.open(client)
        for session in (moving, staying):
            session.exact_turn([400, 401, 402])
        with served(server) as second, second.client() as second_client:
            later = Conversation.open(client)
            for session in (moving, staying, later):
                session.exact_turn([403])  # finds its KV
            assert second.sessions() == {}
            for session in (moving, later):
                session.client = second_client
                session.turn([404], resumed=True)
                session.exact_turn([405])
            assert second.sessions().keys() == {moving.session_id, later.session_id}
            eventually(lambda: first.sessions().keys() == {staying.session_id})
            staying.exact_turn([406])
            # Until their next heartbeats the first cluster's replicas still hold the claimed sessions. A turn would
            # fail there.
            eventually(lambda: sum(replica["sessions"] for replica in first.replicas().values()) == 1)
            moving.client = client
            moving.turn([407], resumed=True)
            moving.exact_turn([408])
            moving.close()
            assert later.session_id in second.sessions()
            opened_there = Conversation.open(second_client)
            opened_there.exact_turn([400])
        staying.exact_turn([409])
        for session in (later, opened_there):
            session.client = client
            session.turn([410], resumed=True)
            session.exact_turn([411])
        assert first.metric("kedge_controller_sessions_taken_over_total") == 2
