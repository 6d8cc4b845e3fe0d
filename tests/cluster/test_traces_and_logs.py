"""Traces and logs of a real cluster, across its processes and in Ray Serve's files."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from served_cluster import ServedCluster, eventually
from traced_cluster import durable_and_traced

from tests.unit.serving.otlp_collector import Collector, Span

TRACE_ID, CLIENTS_SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SECRET = "the cat is called Tibbles"
CHAT = "/v1/chat/completions"
WHOLE_TURN = f"""\
POST {CHAT}
  parse
  chat kedge-chat
    place
    dispatch
      turn
        begin
        queue
        prefill
        decode
        commit"""


@pytest.fixture(scope="module")
def cluster(shared_cluster: ServedCluster, collector: Collector) -> ServedCluster:
    shared_cluster.use(durable_and_traced(collector.endpoint))
    return shared_cluster


def records(cluster: ServedCluster) -> list[dict[str, Any]]:
    """All log records of front ends and replicas."""
    folder = cluster.directory / "ray" / "session_latest" / "logs" / "serve"
    files = Path(folder).glob("replica_kedge_*.log")
    lines = [line for path in files for line in path.read_text().splitlines()]
    return [json.loads(line) for line in lines if line.startswith("{")]


def drained(cluster: ServedCluster) -> Counter[str]:
    """How often operators drained each replica, by the log."""
    return Counter(each["replica_id"] for each in records(cluster) if each.get("event") == "replica_drained")


def test_a_turn_is_one_trace_and_one_line(cluster: ServedCluster, collector: Collector) -> None:
    headers = {
        "traceparent": f"00-{TRACE_ID}-{CLIENTS_SPAN}-01",
        "x-request-id": "req-of-a-client",
        "x-session-id": "diary",
        "x-tenant-id": "acme",
    }
    body = {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 8, "temperature": 0}
    with cluster.client() as client:
        reply = client.post(CHAT, json=body, headers=headers).raise_for_status()
    assert reply.headers.get_list("x-request-id") == ["req-of-a-client"]

    def of_this_trace() -> dict[str, Span]:
        """By name. Turns of earlier tests have traces of their own."""
        return {span.name: span for span in collector.spans if span.trace_id == TRACE_ID}

    eventually(lambda: {"commit", f"POST {CHAT}"} <= of_this_trace().keys())
    assert collector.tree(CLIENTS_SPAN) == WHOLE_TURN
    assert sum(span.trace_id == TRACE_ID for span in collector.spans) == len(WHOLE_TURN.splitlines())
    assert of_this_trace()["chat kedge-chat"].attributes["gen_ai.usage.output_tokens"] == 8
    turn = of_this_trace()["turn"]
    assert turn.service == "kedge-replica"

    def line() -> dict[str, Any] | None:
        lines = (each for each in records(cluster) if each.get("name") == "kedge.access")
        return next((each for each in lines if each["request_id"] == "req-of-a-client"), None)

    told = eventually(line)
    wanted = {
        "route": CHAT,
        "status": 200,
        "tenant": "acme",
        "session_id": "diary",
        "turn": 0,
        "output_tokens": 8,
    }
    assert {name: told[name] for name in wanted} == wanted
    assert told["trace_id"] == TRACE_ID
    assert told["replica_id"] == turn.attributes["kedge.replica_id"]
    assert SECRET not in json.dumps(records(cluster))
    assert SECRET.encode() not in b"".join(collector.raw)


def test_what_operators_do_is_in_the_log(cluster: ServedCluster) -> None:
    before = drained(cluster)
    with cluster.client() as client:
        replica_id = client.get("/get_server_info").json()["replicas"][0]["replica_id"]
        client.post(f"/v1/kedge/replicas/{replica_id}/drain").raise_for_status()
    eventually(lambda: drained(cluster) != before)
    assert drained(cluster) - before == Counter([replica_id])
