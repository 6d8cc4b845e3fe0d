"""A replica that neither answers nor dies does not keep anybody from the other replicas."""

from __future__ import annotations

import time

import httpx
from frozen_process import frozen
from served_cluster import ServedCluster, eventually
from session_client import generate_once

AT_ONCE_S = 8.0
"""Limit for an answer "at once" on a busy machine. A call to a replica may take 15 s."""


def test_figures_and_health_are_those_of_the_replica_that_answers(
    cluster: ServedCluster, client: httpx.Client
) -> None:
    (alive, _), (dead, figures) = sorted(cluster.replicas().items())
    with frozen(figures["pid"]):
        begin_s = time.monotonic()
        assert client.get("/health").status_code == 200
        assert time.monotonic() - begin_s < AT_ONCE_S
        begin_s = time.monotonic()
        text = client.get("/metrics").text
        assert time.monotonic() - begin_s < AT_ONCE_S
        told = {
            line.rpartition('replica="')[2]
            for line in text.splitlines()
            if line.startswith("kedge_kv_pages{")
        }
        assert {name.partition('"')[0] for name in told} == {alive}, "the controller alone tells of the other"
    eventually(lambda: set(cluster.replicas()) == {alive, dead})
    assert len(generate_once(client, [400, 401], 4)) == 4
