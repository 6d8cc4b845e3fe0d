"""A session log in Redis: it outlives the cluster, and what it cannot take is neither lost nor done twice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from served_cluster import ROOT, ServedCluster, eventually
from session_client import Conversation

from tests.unit.controllers.redis_server import RedisServer


@pytest.fixture
def server() -> Iterator[RedisServer]:
    server = RedisServer("--appendonly", "yes")
    yield server
    server.stop()


@contextmanager
def served(server: RedisServer) -> Iterator[httpx.Client]:
    def edit(document: dict[str, Any]) -> None:
        document["applications"][0]["import_path"] = "null_app:build"
        args = document["applications"][0]["args"]
        args["replicas"]["count"] = 1
        args["controller"]["redis_url"] = server.url

    cluster = ServedCluster(ROOT / "configs" / "cluster.yaml", edit)
    cluster.start()
    try:
        with cluster.client() as client:
            yield client
    finally:
        cluster.stop()


def test_sessions_outlive_the_cluster_and_a_frozen_redis(server: RedisServer) -> None:
    with served(server) as client:
        session = Conversation.open(client)
        session.exact_turn([400, 401, 402])
        server.pause()
        headers = {"idempotency-key": "once"}
        body = {
            "input_ids": [403],
            "sampling_params": {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True},
            "session_params": {"id": session.session_id},
        }
        refused = client.post("/generate", json=body, headers=headers)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "store_unavailable")
        server.go_on()

        def answered() -> httpx.Response | None:
            reply = client.post("/generate", json=body, headers=headers)
            return reply if reply.status_code == 200 else None

        session.history += [403, *eventually(answered).json()["output_ids"]]
        session.exact_turn([404])
    with served(server) as client:
        session.client = client
        session.turn([405], resumed=True)
        session.exact_turn([406])
