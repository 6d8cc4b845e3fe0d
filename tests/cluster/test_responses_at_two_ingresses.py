"""Background responses at two ingresses: each ingress knows the responses of the other."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from served_cluster import ServedCluster, eventually

INGRESS = "ray::ServeReplica:kedge:Ingress"
ENDED = ("completed", "incomplete", "failed", "cancelled")
MANY = 8
"""Number of responses or calls. It is large enough that each ingress gets some."""
LONG: dict[str, Any] = {
    "input": "Tell me everything.",
    "background": True,
    "temperature": 2.0,
    "max_output_tokens": 1500,
}


def two_ingresses(document: dict[str, Any]) -> None:
    document["applications"][0]["args"]["ingress"]["count"] = 2


@pytest.fixture(scope="module")
def cluster(shared_cluster: ServedCluster) -> ServedCluster:
    shared_cluster.use(two_ingresses)
    return shared_cluster


@pytest.fixture
def client(cluster: ServedCluster) -> Iterator[httpx.Client]:
    with cluster.client() as http:
        eventually(lambda: len(cluster.pids(INGRESS)) == 2, 60)
        yield http


def begin(cluster: ServedCluster, **fields: Any) -> str:
    with cluster.client() as http:
        reply = http.post("/v1/responses", json=LONG | fields)
    assert reply.status_code == 200, reply.text
    return str(reply.json()["id"])


def now(cluster: ServedCluster, response_id: str) -> dict[str, Any]:
    """The response as some ingress has it. An ingress that has just died does not answer: its connections end, or its
    proxy answers 5xx."""

    def answer() -> httpx.Response | None:
        with cluster.client() as http:
            try:
                reply = http.get(f"/v1/responses/{response_id}")
            except httpx.TransportError:
                return None
        return reply if reply.status_code < 500 else None

    reply: httpx.Response = eventually(answer)
    assert reply.status_code == 200, reply.text
    response: dict[str, Any] = reply.json()
    return response


def ended(cluster: ServedCluster, response_id: str) -> dict[str, Any]:
    def end() -> dict[str, Any] | None:
        response = now(cluster, response_id)
        return response if response["status"] in ENDED else None

    found: dict[str, Any] = eventually(end, 120)
    return found


def test_any_ingress_tells_how_far_it_is(cluster: ServedCluster, client: httpx.Client) -> None:
    begun = [begin(cluster, max_output_tokens=60) for _ in range(MANY)]
    for response_id in begun:
        response = ended(cluster, response_id)
        assert response["status"] in ("completed", "incomplete"), response
        for _ in range(MANY):
            assert now(cluster, response_id)["output"] == response["output"]
    told = client.get(f"/v1/responses/{begun[0]}", params={"stream": "true", "starting_after": 2}).text
    assert told.startswith("event: response.output_item.added")
    assert told.count("response.completed") + told.count("response.incomplete") > 0


@pytest.mark.usefixtures("client")
def test_any_ingress_cancels_it(cluster: ServedCluster) -> None:
    for _ in range(MANY):
        response_id = begin(cluster)
        with cluster.client() as http:
            reply = http.post(f"/v1/responses/{response_id}/cancel")
        assert reply.status_code == 200, reply.text
        assert reply.json()["status"] in ENDED[:2] + ENDED[3:]
        assert now(cluster, response_id)["status"] == reply.json()["status"]


@pytest.mark.usefixtures("client")
def test_those_of_an_ingress_that_died_have_failed(cluster: ServedCluster) -> None:
    begun = [begin(cluster) for _ in range(MANY)]
    os.kill(cluster.pids(INGRESS)[0], signal.SIGKILL)
    ends = [ended(cluster, response_id) for response_id in begun]
    for response in ends:
        assert response["status"] in ("completed", "incomplete", "failed"), response
        assert now(cluster, response["id"])["status"] == response["status"], "an end stays"
    eventually(lambda: len(cluster.pids(INGRESS)) == 2, 60)
