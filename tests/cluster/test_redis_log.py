"""A session log in Redis: it outlives the cluster, and while it is away finished turns wait for it."""

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


@pytest.fixture
def server() -> Iterator[RedisServer]:
    server = RedisServer("--appendonly", "yes")
    yield server
    server.stop()


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


def test_sessions_outlive_the_cluster(server: RedisServer) -> None:
    with served(server) as cluster, cluster.client() as client:
        session = Conversation.open(client)
        session.exact_turn([400, 401, 402])
    with served(server) as cluster, cluster.client() as client:
        session.client = client
        session.turn([405], resumed=True)
        session.exact_turn([406])


def test_a_second_cluster_takes_over_session_by_session(server: RedisServer) -> None:
    """As a RayService upgrade starts it beside the first. It fenced the first as soon as it opened the log."""
    with served(server) as old, old.client() as old_client:
        moving, staying = Conversation.open(old_client), Conversation.open(old_client)
        for session in (moving, staying):
            session.exact_turn([400, 401, 402])
        with served(server) as new, new.client() as new_client:
            later = Conversation.open(old_client)
            for session in (moving, staying, later):
                session.exact_turn([403])  # with the KV that it had
            assert new.sessions() == {}
            for session in (moving, later):
                session.client = new_client
                session.turn([404], resumed=True)
                session.exact_turn([405])
            assert new.sessions().keys() == {moving.session_id, later.session_id}
            eventually(lambda: old.sessions().keys() == {staying.session_id})
            staying.exact_turn([406])
            # Until their next heartbeats the former replicas hold what was claimed: a turn that came would be in vain.
            eventually(lambda: sum(replica["sessions"] for replica in old.replicas().values()) == 1)
            moving.client = old_client
            moving.turn([407], resumed=True)
            moving.exact_turn([408])
            moving.close()
            assert later.session_id in new.sessions()
        staying.exact_turn([409])
        assert old.metric("kedge_controller_sessions_taken_over_total") == 2


def test_turns_wait_for_a_frozen_redis_and_keep_their_kv(server: RedisServer) -> None:
    """They ended in store_unavailable after two seconds, and what they had said was computed again."""
    with served(server) as cluster, cluster.client() as client, ThreadPoolExecutor(SESSIONS + 1) as pool:
        talks = [Conversation.open(client) for _ in range(SESSIONS)]
        for number, talk in enumerate(talks):
            talk.exact_turn([400 + number, 401])
        server.pause()
        turns = [pool.submit(talk.told_turn, [500, 501], 40, lambda _: None) for talk in talks]
        opening = pool.submit(Conversation.open, client, "later")
        eventually(lambda: cluster.metric("kedge_commits_pending") == SESSIONS, 60)
        frozen = cluster.metric("kedge_commit_retries_total") + 8 * SESSIONS
        eventually(lambda: cluster.metric("kedge_commit_retries_total") > frozen, 60)
        assert not any(turn.done() for turn in [*turns, opening])
        assert len(generate_once(client, [500, 501], 8)) == 8, "what needs no log goes on"
        assert len(cluster.sessions()) == SESSIONS, "the controller answers"
        server.go_on()
        for turn in turns:
            assert len(turn.result(60)) == 40
        for talk in [*talks, opening.result(60)]:
            talk.exact_turn([600])  # which finds all of the history's KV
        eventually(lambda: cluster.metric("kedge_commits_pending") == 0)
        for outcome in ("store_failed", "stale", "error", "unavailable"):
            assert cluster.metric("kedge_turns_total", outcome=outcome) == 0
