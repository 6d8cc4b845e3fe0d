"""Two ingresses with one replica: whichever gets a call knows, or finds out, what it needs from the other."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import httpx
import pytest
from frozen_process import frozen
from null_app import HOLD
from prometheus_client.parser import text_string_to_metric_families
from served_cluster import ServedCluster, eventually
from session_client import Conversation, generate_once

INGRESS = "ray::ServeReplica:kedge:Ingress"
NUM_CALLS = 6
"""Number of calls at the same time, large enough that each ingress gets some."""

AT_ONCE_S = 8.0
"""Limit for an answer "at once" on a busy machine. An ingress waits 3 s for the other."""

PROMPT = [400, 401, 402]
LENGTH = 600
GOING_S = 45.0
"""Limit until a deploy has reached the ingresses and they have noticed. From then their streams could go on for 60
s."""
LEFTOVERS_S = 5.0
"""Limit on a busy machine until the turn of an ingress that died is taken back."""


def two_ingresses_one_replica(document: dict[str, Any]) -> None:
    document["applications"][0]["import_path"] = "null_app:build"
    args = document["applications"][0]["args"]
    args["ingress"]["count"], args["replicas"]["count"] = 2, 1


@pytest.fixture(scope="module")
def cluster(shared_cluster: ServedCluster) -> ServedCluster:
    shared_cluster.use(two_ingresses_one_replica)
    return shared_cluster


@pytest.fixture
def client(cluster: ServedCluster) -> Iterator[httpx.Client]:
    with cluster.client() as http:
        eventually(lambda: len(lookups(http)) == 2, 60)
        yield http


def lookups(client: httpx.Client) -> dict[str, float]:
    """The lookup counter of each ingress, from one scrape."""
    return {
        sample.labels["ingress"]: sample.value
        for family in text_string_to_metric_families(client.get("/metrics").text)
        for sample in family.samples
        if sample.name == "kedge_ownership_lookups_total"
    }


def stream_of(request_id: str, session: Conversation | None = None, length: int = LENGTH) -> dict[str, Any]:
    body = {
        "input_ids": PROMPT,
        "stream": True,
        "rid": request_id,
        "sampling_params": {"max_new_tokens": length, "temperature": 0, "ignore_eos": True},
    }
    return body if session is None else body | {"session_params": {"id": session.session_id}}


def test_every_scrape_shows_every_ingress_and_no_counter_goes_back(
    cluster: ServedCluster, client: httpx.Client
) -> None:
    def short_session(_: int) -> None:
        with cluster.client() as http:  # calls at the same time do not all reach one ingress
            session = Conversation.open(http)
            session.turn(PROMPT, 1)
            session.close()

    before, num_scrapes = lookups(client), 0
    while num_scrapes < 12 or not all(before.values()):
        with ThreadPoolExecutor(NUM_CALLS) as pool:
            list(pool.map(short_session, range(NUM_CALLS)))
        after = lookups(client)
        assert after.keys() == before.keys()
        assert all(after[name] >= before[name] for name in before), (before, after)
        before, num_scrapes = after, num_scrapes + 1
        assert num_scrapes < 200, f"one ingress has no calls: {before}"


def test_a_frozen_ingress_holds_up_neither_scrapes_nor_aborts_at_the_other(cluster: ServedCluster) -> None:
    """Ray's proxy still sends calls to the frozen ingress. Those calls are lost for everybody."""

    def at_the_other(ask: Callable[[httpx.Client], Any]) -> Any:
        for _ in range(20):
            with cluster.client() as client, suppress(httpx.ReadTimeout):
                client.timeout = httpx.Timeout(AT_ONCE_S)
                return ask(client)
        raise AssertionError("nobody answered")

    victim, _ = cluster.pids(INGRESS)
    with frozen(victim):
        assert len(at_the_other(lookups)) == 1
        aborted = at_the_other(lambda client: client.post("/abort_request", json={"rid": "nobody"}))
        assert aborted.status_code == 200


def test_an_abort_holds_while_there_is_no_replica(cluster: ServedCluster, client: httpx.Client) -> None:
    """The abort ends all turns that clients of either ingress wait for, whichever ingress gets it."""
    sessions = [Conversation.open(client) for _ in range(NUM_CALLS // 2)]
    begun = [threading.Event() for _ in range(NUM_CALLS)]

    def last_line(number: int) -> str:
        session = sessions[number] if number < len(sessions) else None
        body, last = stream_of(f"rid-{number}", session, 3900), ""
        with cluster.client() as http, http.stream("POST", "/generate", json=body) as reply:
            for line in reply.iter_lines():
                begun[number].set()
                last = line if line.startswith("data: {") else last
        return last.replace(" ", "")

    (pid,) = (replica["pid"] for replica in cluster.replicas().values())
    with ThreadPoolExecutor(NUM_CALLS) as pool:
        streams = [pool.submit(last_line, number) for number in range(NUM_CALLS)]
        assert all(event.wait(60) for event in begun)
        failovers = cluster.metric("kedge_failovers_total")
        hold = cluster.state_dir / HOLD
        hold.touch()
        try:
            cluster.kill(pid)
            eventually(lambda: cluster.metric("kedge_failovers_total") >= failovers + NUM_CALLS)
            assert client.post("/abort_request", json={"abort_all": True}).status_code == 200
            ends = [stream.result(10) for stream in streams]
        finally:
            hold.unlink()
    assert ['"type":"abort"' in end for end in ends] == [True] * NUM_CALLS, ends
    assert cluster.metric("kedge_takeovers_total") == 0
    eventually(lambda: len(cluster.replicas()) == 1, 90)
    assert cluster.nothing_runs()
    for session in sessions:
        session.turn(PROMPT)
        session.close()


def test_a_turn_whose_ingress_is_killed_runs_once(cluster: ServedCluster, client: httpx.Client) -> None:
    answer = generate_once(client, PROMPT, LENGTH)
    sessions = [Conversation.open(client) for _ in range(NUM_CALLS)]
    begun = [threading.Event() for _ in range(NUM_CALLS)]

    def tokens_of(number: int) -> tuple[list[int], bool, float]:
        """The answer, whether it broke off at first, and for how long its session then had a turn in flight."""
        body, headers, last = stream_of(f"rid-{number}", sessions[number]), {"idempotency-key": "once"}, ""
        try:
            with (
                cluster.client() as http,
                http.stream("POST", "/generate", json=body, headers=headers) as reply,
            ):
                for line in reply.iter_lines():
                    begun[number].set()
                    last = line or last
            assert last == "data: [DONE]"
            broke_off = False
        except httpx.RemoteProtocolError:
            broke_off = True
        begin_s = busy_s = time.monotonic()
        while True:
            with cluster.client() as http:
                again = http.post("/generate", json=body | {"stream": False}, headers=headers)
            if again.status_code == 200:
                return again.json()["output_ids"], broke_off, busy_s - begin_s
            if again.status_code != 500:  # a 500 is the proxy's, before it knows that the ingress is gone
                assert again.json()["error"]["code"] == "turn_in_flight", again.text
                busy_s = time.monotonic()

    with ThreadPoolExecutor(NUM_CALLS) as pool:
        told = [pool.submit(tokens_of, number) for number in range(NUM_CALLS)]
        assert all(event.wait(60) for event in begun)
        cluster.kill(cluster.pids(INGRESS)[0])
        results = [each.result(90) for each in told]
    assert [tokens for tokens, _, _ in results] == [answer] * NUM_CALLS
    assert any(broke_off for _, broke_off, _ in results)
    assert max(busy_s for _, _, busy_s in results) < LEFTOVERS_S
    entries = cluster.sessions()
    for session in sessions:
        assert entries[session.session_id]["turns"] == 1
        session.history += PROMPT + answer
        session.turn([403])
        session.close()
    assert client.get("/v1/kedge/audit").json()["clean"]


def test_who_watches_does_not_hold_an_ingress_that_is_to_go(cluster: ServedCluster) -> None:
    begun = [threading.Event() for _ in range(NUM_CALLS)]

    def end_of_stream(number: int) -> str:
        last = ""
        with cluster.client() as http, http.stream("GET", "/v1/kedge/watch") as reply:
            for line in reply.iter_lines():
                begun[number].set()
                last = line or last
        return last

    def edit(document: dict[str, Any]) -> None:
        document["applications"][0]["args"]["ingress"]["keep_alive_s"] = 4.0

    with ThreadPoolExecutor(NUM_CALLS) as pool:
        watching = [pool.submit(end_of_stream, number) for number in range(NUM_CALLS)]
        assert all(event.wait(60) for event in begun)
        deadline_s = time.monotonic() + GOING_S
        cluster.deploy(edit)
        ends = [each.result(deadline_s - time.monotonic()) for each in watching]
    assert ["front_end_stops" in end for end in ends] == [True] * NUM_CALLS, ends
