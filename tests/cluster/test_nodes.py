"""Three nodes on one machine: replicas are spread over them, and one that is lost ends no turn."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
from null_app import build
from ray import serve
from ray.cluster_utils import Cluster
from served_cluster import ROOT, eventually, free_port
from session_client import Conversation

from serving.settings.config import AppArgs

NODES = 3
SESSIONS = 6
LENGTH = 400
START_TIMEOUT_S = 150.0


class Nodes:
    """The head node, where the controller is, and one more for each replica. The front end is on any."""

    def __init__(self, state_dir: Path) -> None:
        self._cluster = Cluster(
            initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
        )
        self.workers = [self._cluster.add_node(num_cpus=2) for _ in range(NODES - 1)]
        ray.init(address=self._cluster.address, log_to_driver=False)
        args = AppArgs.model_validate(
            {
                "model": {"path": str(ROOT / "assets" / "models" / "kedge-chat"), "num_threads": 1},
                "replicas": {"count": NODES - 1, "num_cpus": 1.5},
                "ingress": {"num_cpus": 0.4},
                "controller": {"state_dir": str(state_dir)},
            }
        )
        port = free_port()
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
        serve.run(build(args), name="kedge")
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=httpx.Timeout(60.0))
        eventually(lambda: len(self.replicas()) == NODES - 1, START_TIMEOUT_S)

    def replicas(self) -> dict[str, Any]:
        """What each replica says of itself, by id."""
        listed = self.client.get("/get_server_info").json()["replicas"]
        return {replica["replica_id"]: replica for replica in listed}

    def owners(self) -> dict[str, str]:
        """The replica of each session."""
        listed = self.client.get("/v1/kedge/sessions").json()["sessions"]
        return {session["session_id"]: session["replica_id"] for session in listed}

    def node_of(self, pid: int) -> Any:
        """The node whose raylet is the process's parent; None if it is none of these."""
        status = Path(f"/proc/{pid}/status").read_text()
        parent = int(next(line for line in status.splitlines() if line.startswith("PPid:")).split()[1])
        for node in self._cluster.list_all_nodes():
            if node.all_processes["raylet"][0].process.pid == parent:
                return node
        return None

    def front_end(self) -> Any:
        """The node where the ingress is."""
        for path in Path("/proc").glob("[0-9]*"):
            try:
                titled = path.joinpath("cmdline").read_bytes().startswith(b"ray::ServeReplica:kedge:Ingress")
                node = self.node_of(int(path.name)) if titled else None
            except OSError:
                continue
            if node is not None:
                return node
        raise AssertionError("no ingress")

    def kill(self, node: Any) -> None:
        self._cluster.remove_node(node, allow_graceful=False)

    def stop(self) -> None:
        self.client.close()
        serve.shutdown()
        ray.shutdown()
        self._cluster.shutdown()


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "tests" / "cluster")]))
    nodes = Nodes(tmp_path)
    yield nodes
    nodes.stop()


def test_replicas_are_spread_and_a_lost_node_ends_no_turn(nodes: Nodes) -> None:
    homes = {replica_id: nodes.node_of(info["pid"]) for replica_id, info in nodes.replicas().items()}
    assert set(homes.values()) == set(nodes.workers), "one on each"
    talks = [Conversation.open(nodes.client) for _ in range(SESSIONS)]
    for talk in talks:
        talk.exact_turn([400, 401])
    before = nodes.owners()
    victim = next(replica_id for replica_id, node in homes.items() if node is not nodes.front_end())
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
