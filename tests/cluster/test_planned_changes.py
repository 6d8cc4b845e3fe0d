"""Replicas are taken away and replaced while clients talk: no turn fails, none is said twice, nobody waits for a
load."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from served_cluster import ROOT, ServedCluster, eventually
from session_client import Conversation, random_tokens

NUM_CLIENTS = 6
AROUND_S = 3.0
"""Of talk before and after a change."""


def null_app(document: dict[str, Any]) -> None:
    document["applications"][0]["import_path"] = "null_app:build"


@pytest.fixture(scope="module")
def cluster() -> Iterator[ServedCluster]:
    served = ServedCluster(ROOT / "configs" / "cluster.yaml", null_app)
    served.start()
    try:
        yield served
    finally:
        served.stop()


@dataclass
class Talk:
    """What the clients saw. `turns` are when each ended, `waits_s` until its first token."""

    failures: list[BaseException] = field(default_factory=list)
    turns: list[float] = field(default_factory=list)
    waits_s: list[float] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    def run(self, cluster: ServedCluster, seed: int) -> None:
        """One client: streamed turns of one session, each checked against what it was told before."""
        rng = random.Random(seed)
        try:
            with cluster.client() as client:
                session = Conversation.open(client)
                while not self.over.is_set():
                    self._turn(session, rng)
                session.close()
        except BaseException as error:
            self.failures.append(error)

    def _turn(self, session: Conversation, rng: random.Random) -> None:
        began_s, heard_s = time.monotonic(), list[float]()
        session.told_turn(random_tokens(rng, 5), 40, lambda _: heard_s.append(time.monotonic()))
        self.waits_s.append(heard_s[0] - began_s)
        self.turns.append(time.monotonic())
        if len(session.history) > 2000:
            session.close()
            session.session_id, session.history = Conversation.open(session.client).session_id, []

    def report(self) -> str:
        gaps_s = [after - before for before, after in zip(self.turns, self.turns[1:], strict=False)]
        waits_s = sorted(self.waits_s)
        late = sum(wait_s > 1.0 for wait_s in waits_s)
        return (
            f"{len(self.turns)} turns, first token at worst after {waits_s[-1]:.2f} s, {late} over 1 s,"
            f" no turn ended for {max(gaps_s):.2f} s at most"
        )


def talk_through(cluster: ServedCluster, change: Any) -> Talk:
    """Clients talk before, while and after `change` is called."""
    talk = Talk()
    clients = [
        threading.Thread(target=talk.run, args=(cluster, seed), daemon=True) for seed in range(NUM_CLIENTS)
    ]
    for each in clients:
        each.start()
    time.sleep(AROUND_S)
    try:
        change()
        time.sleep(AROUND_S)
    finally:
        talk.over.set()
        for each in clients:
            each.join(120.0)
    assert not any(each.is_alive() for each in clients), "a turn hangs"
    assert not talk.failures, talk.failures
    logging.getLogger(__name__).info("%s", talk.report())
    return talk


def test_a_rolling_update_fails_no_turn(cluster: ServedCluster) -> None:
    """Replicas drained by Serve were reported lost, registered again as the emptiest, and attracted sessions."""
    before = set(cluster.replicas())

    def update() -> None:
        cluster.deploy(lambda document: document["applications"][0]["args"]["cache"].update(num_pages=1500))
        eventually(lambda: len(cluster.replicas()) == 2 and not before & set(cluster.replicas()), 90)

    talk_through(cluster, update)
    assert cluster.metric("kedge_controller_replicas_draining") == 0
    assert cluster.metric("kedge_ownership_drained_total") > 0
    assert cluster.metric("kedge_turns_total", outcome="stale") == 0
    eventually(lambda: cluster.pages()["in_flight"] == 0)
    assert cluster.pages()["leaked"] == 0


def test_scaling_down_and_up_fails_no_turn(cluster: ServedCluster) -> None:
    """By Serve's own override, beside `args`: a change of `args` would replace every replica."""
    before = set(cluster.replicas())

    def to(count: int) -> None:
        override = [{"name": "LLMReplica", "num_replicas": count}]
        cluster.deploy(lambda document: document["applications"][0].update(deployments=override))
        eventually(lambda: len(cluster.replicas()) == count, 90)

    talk_through(cluster, lambda: [to(1), to(2)])
    assert before & set(cluster.replicas()), "the replica that stays is not replaced"


def test_an_answer_of_the_draining_replica_is_told_to_its_end(cluster: ServedCluster) -> None:
    """Turns in flight end where they began; the session's next turn goes elsewhere, with its whole history."""
    with cluster.client() as client:
        sessions = [Conversation.open(client) for _ in range(4)]
        for session in sessions:
            session.turn([400, 401, 402])
        owners = {name: entry["replica_id"] for name, entry in cluster.sessions().items()}
        old = set(cluster.replicas())
        update = threading.Thread(
            target=cluster.deploy,
            args=(lambda document: document["applications"][0]["args"]["cache"].update(num_pages=1400),),
        )
        began: list[Any] = []

        def start_update(number: int) -> None:
            if number == 3:
                update.start()
                began.append(number)

        with httpx.Client(base_url=cluster.url, timeout=120.0) as other:
            streamed = Conversation(other, sessions[0].session_id, sessions[0].history)
            streamed.told_turn([500], 1500, start_update)
            assert began
        update.join(200.0)
        eventually(lambda: not old & set(cluster.replicas()), 90)
        for session in sessions:
            session.exact_turn([600], resumed=True)
            assert cluster.sessions()[session.session_id]["replica_id"] != owners[session.session_id]
            session.close()


def test_a_drain_by_hand_empties_one_replica_and_has_it_replaced(cluster: ServedCluster) -> None:
    before = set(cluster.replicas())
    victim = min(before)

    def drain() -> None:
        with cluster.client() as client:
            assert client.post(f"/v1/kedge/replicas/{victim}/drain").status_code == 202
            assert client.post("/v1/kedge/replicas/nobody/drain").status_code == 404
        eventually(lambda: len(cluster.replicas()) == 2 and victim not in cluster.replicas(), 90)

    talk_through(cluster, drain)
    assert before - {victim} <= set(cluster.replicas())
