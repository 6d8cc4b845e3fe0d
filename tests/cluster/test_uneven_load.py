"""Busy sessions that share a replica spread over both replicas. Their turns stay exact and leave nothing behind."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
from neighbours import neighbours
from served_cluster import ServedCluster, eventually
from session_client import Conversation, generate_once, random_tokens

NUM_SESSIONS = 12
LENGTH = 64
MOVED = "kedge_ownership_rebalanced_total"


class Talk:
    """Turn after turn of one session. `computed` has the turns (prompt, answer) that did not find their KV."""

    def __init__(self, session: Conversation, seed: int) -> None:
        self.session = session
        self.computed: list[tuple[list[int], list[int]]] = []
        self._rng = random.Random(seed)
        self._turn(100)
        self.computed.clear()  # the first turn has no KV to find

    def go_on(self, enough: threading.Event) -> None:
        while not enough.is_set():
            self._turn(5)

    def _turn(self, num_new: int) -> None:
        new = random_tokens(self._rng, num_new)
        prompt = self.session.history + new
        if self.session.turn(new, LENGTH, resumed=True)["cached_tokens"] < len(prompt) - num_new - 1:
            self.computed.append((prompt, self.session.history[len(prompt) :]))


def sessions_with_kv(cluster: ServedCluster) -> int:
    """Number of sessions with KV at all replicas together."""
    return sum(replica["sessions"] for replica in cluster.replicas().values())


def test_busy_sessions_of_one_replica_spread_over_both(cluster: ServedCluster, client: httpx.Client) -> None:
    owner, sessions = neighbours(cluster, client, NUM_SESSIONS)
    talks = [Talk(session, seed) for seed, session in enumerate(sessions)]
    before, moved_before = cluster.sessions(), cluster.metric(MOVED)
    with_kv = sessions_with_kv(cluster)
    enough = threading.Event()
    with ThreadPoolExecutor(NUM_SESSIONS) as pool:
        going = [pool.submit(talk.go_on, enough) for talk in talks]
        try:
            eventually(lambda: cluster.metric(MOVED) >= moved_before + 3, 60, 0.5)
        finally:
            enough.set()
    for talk in going:
        talk.result()

    after, moved = cluster.sessions(), 0
    for talk in talks:
        name = talk.session.session_id
        moves = after[name]["epoch"] - before[name]["epoch"]
        assert (after[name]["replica_id"] != owner) == (moves % 2 == 1)
        assert len(talk.computed) == moves, "nothing but a move costs a session its KV"
        for prompt, answer in talk.computed:
            assert generate_once(client, prompt, LENGTH) == answer
        assert after[name]["tokens"] == len(talk.session.history)
        moved += moves
    assert cluster.metric(MOVED) == moved_before + moved
    assert NUM_SESSIONS // 4 <= moved <= NUM_SESSIONS

    eventually(lambda: sessions_with_kv(cluster) == with_kv, 5)  # the former owners have dropped their copies
    assert client.get("/v1/kedge/audit").json()["clean"]
    for talk in talks:
        talk.session.turn([400], resumed=True)  # its replica may still be crowded
        talk.session.close()
    assert client.post("/flush_cache").status_code == 200
