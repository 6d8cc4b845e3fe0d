"""Several nodes on one machine. Losing a node, or an engine on it, ends no turn. The tests share one cluster and depend
on their order: the last one kills the head."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from nodes import Nodes
from null_app import HANG
from served_cluster import eventually
from session_client import Conversation
from talk import talk_through

REPLICAS = 2
SESSIONS = 6
LENGTH = 1200
STEP_TIMEOUT_S = 3.0
GRACE_S = 30.0
REPLACED_S = 90.0
HEAD_AWAY_S = 5.0


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    """One worker more than replicas, for the replica that replaces another."""
    settings = {"replicas": {"step_timeout_s": STEP_TIMEOUT_S, "graceful_shutdown_timeout_s": GRACE_S}}
    with pytest.MonkeyPatch.context() as environment:
        nodes = Nodes(
            tmp_path_factory.mktemp("state"),
            environment,
            workers=REPLICAS + 1,
            replicas=REPLICAS,
            settings=settings,
        )
        try:
            yield nodes
        finally:
            nodes.stop()


def all_there(nodes: Nodes, without: str) -> bool:
    replicas = nodes.replicas()
    return len(replicas) == REPLICAS and without not in replicas


def test_an_engine_that_hangs_is_left_and_replaced(nodes: Nodes) -> None:
    """Earlier its turns, and those of its sessions, waited until Serve killed the replica, GRACE_S after Serve noticed.
    All turns may be in mid-stream when it hangs, so none need wait for its first token."""
    sign = nodes.state_dir / HANG

    def hang() -> None:
        victim, _ = Counter(nodes.owners().values()).most_common(1)[0]  # a replica with sessions
        sign.write_text(str(nodes.replicas()[victim]["pid"]))
        eventually(lambda: all_there(nodes, victim), REPLACED_S)

    talk = talk_through(nodes.client, hang)
    sign.unlink()
    assert STEP_TIMEOUT_S / 4 < max(talk.stalls_s) < GRACE_S / 2, talk.report()


def test_a_node_that_is_drained_ends_no_turn(nodes: Nodes) -> None:
    """Drains as before a spot instance is taken away. Ray ends a node as idle only if it is idle."""
    victim, node = min(nodes.homes().items())
    refused = nodes.drain(node, "DRAIN_NODE_REASON_IDLE_TERMINATION")
    assert "no longer idle" in refused.stderr

    def drain() -> None:
        accepted = nodes.drain(node, "DRAIN_NODE_REASON_PREEMPTION")
        assert accepted.returncode == 0, accepted.stderr
        eventually(lambda: all_there(nodes, victim), REPLACED_S)
        eventually(lambda: nodes.ended(node), REPLACED_S)

    talk_through(nodes.client, drain)
    assert node not in nodes.homes().values()
    nodes.add_worker()


def test_replicas_are_spread_and_a_lost_node_ends_no_turn(nodes: Nodes) -> None:
    homes = nodes.homes()
    assert len(set(homes.values())) == REPLICAS, "one on each"
    front_end = nodes.front_end()
    with nodes.client() as client:
        talks = [Conversation.open(client) for _ in range(SESSIONS)]
        for talk in talks:
            talk.exact_turn([400, 401])
        before = nodes.owners()
        victim = next(replica_id for replica_id, node in homes.items() if node is not front_end)
        assert set(before.values()) == set(homes), "each replica has some"
        heard = threading.Barrier(SESSIONS + 1)

        def tell(number: int) -> None:
            if number == 5:
                heard.wait(60.0)

        with ThreadPoolExecutor(SESSIONS) as pool:
            turns = [pool.submit(talk.told_turn, [500, 501], LENGTH, tell) for talk in talks]
            heard.wait(60.0)
            nodes.kill(homes[victim])
            for turn in turns:
                assert len(turn.result(120.0)) == LENGTH
        after = nodes.owners()
        for talk in talks:
            moved = before[talk.session_id] == victim
            assert (after[talk.session_id] != before[talk.session_id]) == moved
            talk.exact_turn([600])
            talk.close()
    nodes.add_worker()
    eventually(lambda: all_there(nodes, victim), REPLACED_S)


def test_workers_serve_while_the_head_is_away_and_go_on_with_the_next(nodes: Nodes) -> None:
    """Both Ray's state and the session log are in Redis. The new head recreates what the old head had, including the
    session ledger and Serve's controller. Replicas, their sessions and their KV stay where they are."""
    replicas = set(nodes.replicas())
    with nodes.client_at_worker() as client:
        sessions = [Conversation.open(client) for _ in range(SESSIONS)]
        for session in sessions:
            session.turn([400, 401, 402])
        before = nodes.owners()

        def lose_the_head() -> None:
            nodes.kill_head()
            time.sleep(HEAD_AWAY_S)
            nodes.start_head()
            eventually(lambda: len(nodes.replicas()) == REPLICAS, REPLACED_S)

        talk_through(nodes.client_at_worker, lose_the_head)
        assert set(nodes.replicas()) == replicas, "they live on"
        after = nodes.owners()
        for session in sessions:
            assert after[session.session_id] == before[session.session_id]
            session.turn([403])  # finds its KV
            session.exact_turn([404])
            session.close()
