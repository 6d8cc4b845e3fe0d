"""While the controller does not answer, turns with a known owner run, and finished turns wait for it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from frozen_process import frozen
from served_cluster import ServedCluster, eventually
from session_client import Conversation

SESSIONS = 3


def test_turns_wait_for_a_frozen_controller_and_keep_their_kv(cluster: ServedCluster) -> None:
    with cluster.client() as client, ThreadPoolExecutor(SESSIONS) as pool:
        talks = [Conversation.open(client) for _ in range(SESSIONS)]
        for talk in talks:
            talk.exact_turn([400, 401])
        (controller,) = cluster.pids("ray::ClusterController")
        with frozen(controller):
            turns = [pool.submit(talk.told_turn, [500, 501], 40, lambda _: None) for talk in talks]
            eventually(lambda: cluster.metric("kedge_commits_pending") == SESSIONS, 60)
            assert not any(turn.done() for turn in turns)
        for turn in turns:
            assert len(turn.result(60)) == 40
        for talk in talks:
            talk.exact_turn([600])  # finds the KV of the whole history
            talk.close()
