"""Conversations without a name that are durable in the session log: what they outlive, and how they move."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from served_cluster import ServedCluster, eventually
from traced_cluster import durable_and_traced

from tests.unit.serving.otlp_collector import Collector

INGRESS = "ray::ServeReplica:kedge:Ingress"


@pytest.fixture(scope="module")
def cluster(shared_cluster: ServedCluster, collector: Collector) -> ServedCluster:
    shared_cluster.use(durable_and_traced(collector.endpoint))
    return shared_cluster


@pytest.fixture
def client(cluster: ServedCluster) -> Iterator[httpx.Client]:
    with cluster.client() as http:
        yield http


@dataclass
class Talk:
    """A client that sends all that was said each time, and nothing else. `topic` makes its conversation its own."""

    client: httpx.Client
    topic: str
    messages: list[dict[str, str]] = field(default_factory=list)

    def turn(self) -> dict[str, Any]:
        """One turn; returns its usage. Checks that a fresh request has the same answer."""
        question = f"{self.topic} {len(self.messages)}. My dog is called Rex. What is my dog called?"
        self.messages.append({"role": "user", "content": question})
        reply = self._ask()
        self.messages.append({"role": "assistant", "content": reply["choices"][0]["message"]["content"]})
        return dict(reply["usage"])

    def again(self) -> str:
        """The answer that the last turn would have without anything of the conversation in the cache."""
        asked, self.messages = self.messages, self.messages[:-1]
        try:
            return str(self._ask(cache_salt="fresh")["choices"][0]["message"]["content"])
        finally:
            self.messages = asked

    def _ask(self, **fields: Any) -> dict[str, Any]:
        body = {"messages": self.messages, "temperature": 0, "max_tokens": 16, **fields}
        reply = self.client.post("/v1/chat/completions", json=body)
        assert reply.status_code == 200, reply.text
        return dict(reply.json())


def cached(usage: dict[str, Any]) -> int:
    return int(usage["prompt_tokens_details"]["cached_tokens"])


def session_of(cluster: ServedCluster) -> dict[str, Any]:
    (found,) = (each for name, each in cluster.sessions().items() if name.startswith("unnamed-"))
    return found


def begun(cluster: ServedCluster, client: httpx.Client, topic: str) -> tuple[Talk, dict[str, Any], int]:
    """A conversation of three turns, its session, and how many tokens it has."""
    for name in cluster.sessions():
        client.post("/close_session", json={"session_id": name}).raise_for_status()
    talk = Talk(client, topic)
    assert talk.turn() is not None
    assert not cluster.sessions(), "it has one turn only"
    talk.turn()
    usage = talk.turn()
    assert cached(usage) > 0.6 * usage["prompt_tokens"]
    return talk, session_of(cluster), usage["prompt_tokens"] + usage["completion_tokens"]


def test_it_is_a_session_of_the_log(cluster: ServedCluster, client: httpx.Client) -> None:
    talk, session, _ = begun(cluster, client, "log")
    assert session["turns"] == 2
    talk.turn()
    assert session_of(cluster)["turns"] == 3
    shown = client.get(f"/v1/kedge/sessions/{session['session_id']}?messages=true").json()
    assert [each["role"] for each in shown["messages"]] == ["user", "assistant"] * 4


def test_what_has_the_same_cookie_begins_at_one_replica(cluster: ServedCluster, client: httpx.Client) -> None:
    def replicas_of(cookies: list[str]) -> set[str]:
        for name in cluster.sessions():
            client.post("/close_session", json={"session_id": name}).raise_for_status()
        for number, cookie in enumerate(cookies):
            body = {"input": f"{cookie} {number}", "max_output_tokens": 2}
            client.post("/v1/responses", json=body, headers={"cookie": f"stick={cookie}"}).raise_for_status()
        return {session["replica_id"] for session in cluster.sessions().values()}

    assert len(replicas_of(["a"] * 8)) == 1
    assert len(replicas_of([str(number) for number in range(24)])) == 2


def test_a_drained_replica_hands_it_over(cluster: ServedCluster, client: httpx.Client) -> None:
    talk, session, _ = begun(cluster, client, "drain")
    client.post(f"/v1/kedge/replicas/{session['replica_id']}/drain").raise_for_status()
    eventually(lambda: session_of(cluster)["replica_id"] != session["replica_id"], 60)
    usage = talk.turn()
    assert talk.messages[-1]["content"] == talk.again()
    assert session_of(cluster)["turns"] == 3
    assert cached(talk.turn()) >= usage["prompt_tokens"]
    eventually(lambda: session["replica_id"] not in cluster.replicas() and len(cluster.replicas()) == 2, 120)


def test_it_outlives_its_replica_and_the_front_end(cluster: ServedCluster, client: httpx.Client) -> None:
    """A front end that has just started has no index of conversations, and finds it."""
    talk, session, length = begun(cluster, client, "crash")
    before = cluster.pids(INGRESS)
    for pid in before:
        cluster.kill(pid)
    eventually(lambda: (pids := cluster.pids(INGRESS)) and not set(pids) & set(before), 60)
    eventually(lambda: answers(cluster), 60)
    with cluster.client() as fresh:
        talk.client = fresh
        assert cached(talk.turn()) >= length - 1
        cluster.kill(int(cluster.replicas()[session["replica_id"]]["pid"]))
        usage = talk.turn()
        assert talk.messages[-1]["content"] == talk.again()
        moved = session_of(cluster)
        assert (moved["turns"], moved["replica_id"] != session["replica_id"]) == (4, True)
        assert cached(talk.turn()) >= usage["prompt_tokens"]
    eventually(lambda: len(cluster.replicas()) == 2, 120)


def answers(cluster: ServedCluster) -> bool:
    try:
        with cluster.client() as client:
            return client.get("/health").status_code == 200
    except httpx.TransportError:
        return False
