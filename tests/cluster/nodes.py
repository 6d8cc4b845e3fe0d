"""A cluster of several nodes on one machine, with the null runner. The head has the controllers; workers have replicas
and front ends. One Redis keeps Ray's own state and the session log, so that the head can return."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
from null_app import build
from ray import serve
from ray.cluster_utils import Cluster
from served_cluster import ROOT, eventually, free_port

from serving.settings.config import AppArgs
from tests.unit.controllers.redis_server import RedisServer

START_TIMEOUT_S = 150.0
DRAIN_S = 60


class Nodes:
    """A cluster of `workers` nodes with `replicas` replicas. Each worker has room for one replica and one front end.
    Clients connect at the head or at any worker. Whoever made `environment` undoes its changes."""

    def __init__(
        self,
        state_dir: Path,
        environment: pytest.MonkeyPatch,
        *,
        workers: int,
        replicas: int,
        settings: dict[str, Any],
    ) -> None:
        self.redis_port, self.port, self.worker_port = free_port(), free_port(), free_port()
        self.redis = RedisServer("--port", str(self.redis_port))
        self._gcs_port = free_port()
        self.state_dir, self.count = state_dir, replicas
        environment.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "tests" / "cluster")]))
        environment.setenv("RAY_REDIS_ADDRESS", f"127.0.0.1:{self.redis_port}")
        environment.setenv("RAY_SERVE_WORKER_PROXY_HTTP_PORT", str(self.worker_port))
        environment.setenv("RAY_SERVE_PROXY_MIN_DRAINING_PERIOD_S", "5")  # not 30, to wait less
        environment.setenv("RAY_SERVE_SESSION_ID_HEADER_KEY", "x-ray-session-id")  # as `make serve`
        environment.setenv(
            "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH", "serving.front.ray_headers:middlewares"
        )
        self._cluster = Cluster()
        self.start_head()
        for _ in range(workers):
            self.add_worker()
        self._deploy(settings)
        eventually(lambda: len(self.replicas()) == replicas, START_TIMEOUT_S)

    def _deploy(self, settings: dict[str, Any]) -> None:
        """Deploys the application. It goes on when this process disconnects from Ray."""
        values: dict[str, dict[str, Any]] = {
            "model": {"path": str(ROOT / "assets" / "models" / "kedge-chat"), "num_threads": 1},
            "replicas": {"count": self.count, "num_cpus": 1.5},
            "ingress": {"num_cpus": 0.4},
            "controller": {"state_dir": str(self.state_dir), "redis_url": self.redis.url},
        }
        for section, fields in settings.items():
            values.setdefault(section, {}).update(fields)
        ray.init(address=self._cluster.address, log_to_driver=False)
        try:
            serve.start(proxy_location="EveryNode", http_options={"host": "127.0.0.1", "port": self.port})
            serve.run(build(AppArgs.model_validate(values)), name="kedge")
        finally:
            ray.shutdown()

    def start_head(self) -> None:
        """Starts the head, the first time or with the state that Ray has in Redis."""
        self._cluster.add_node(num_cpus=0, include_dashboard=False, gcs_server_port=self._gcs_port)

    def kill_head(self) -> None:
        self._cluster.remove_node(self._cluster.head_node, allow_graceful=False)

    def add_worker(self) -> Any:
        return self._cluster.add_node(num_cpus=2)

    @property
    def workers(self) -> set[Any]:
        return set(self._cluster.worker_nodes)

    def kill(self, node: Any) -> None:
        self._cluster.remove_node(node, allow_graceful=False)

    def ended(self, node: Any) -> bool:
        """Whether a node that was drained has ended."""
        if node.all_processes["raylet"][0].process.poll() is None:
            return False
        self.kill(node)  # and with it what was started beside its raylet
        return True

    def drain(self, node: Any, reason: str) -> subprocess.CompletedProcess[str]:
        """Runs `ray drain-node`. The node ends when nothing on it is in use any more."""
        ray_command = Path(sys.executable).with_name("ray")
        command = [
            str(ray_command),
            "drain-node",
            "--address",
            self._cluster.address,
            "--node-id",
            node.node_id,
        ]
        command += [
            "--reason",
            reason,
            "--reason-message",
            "test",
            "--deadline-remaining-seconds",
            str(DRAIN_S),
        ]
        return subprocess.run(command, capture_output=True, text=True, timeout=60.0, check=False)

    def client(self) -> httpx.Client:
        """A client of the proxy on the head."""
        return self._client(self.port)

    def client_at_worker(self) -> httpx.Client:
        """A client of the proxy on any worker."""
        return self._client(self.worker_port)

    def _client(self, port: int) -> httpx.Client:
        return httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=httpx.Timeout(120.0))

    def replicas(self) -> dict[str, Any]:
        """What each replica reports about itself, by id. Empty while nobody answers."""
        try:
            with self.client() as client:
                listed = client.get("/get_server_info").json()["replicas"]
        except (httpx.HTTPError, ValueError, KeyError):
            return {}
        return {replica["replica_id"]: replica for replica in listed}

    def homes(self) -> dict[str, Any]:
        """The node of each replica, by the replica's id."""
        return {replica_id: self.node_of(info["pid"]) for replica_id, info in self.replicas().items()}

    def owners(self) -> dict[str, str]:
        """The replica that owns each session, by the session's id."""
        with self.client() as client:
            listed = client.get("/v1/kedge/sessions").json()["sessions"]
        return {session["session_id"]: session["replica_id"] for session in listed}

    def node_of(self, pid: int) -> Any:
        """The node whose raylet is the parent of the process; None if it belongs to no node."""
        status = Path(f"/proc/{pid}/status").read_text()
        parent = int(next(line for line in status.splitlines() if line.startswith("PPid:")).split()[1])
        for node in self._cluster.list_all_nodes():
            if node.all_processes["raylet"][0].process.pid == parent:
                return node
        return None

    def front_end(self) -> Any:
        """The node of the ingress; None while no ingress runs."""
        for path in Path("/proc").glob("[0-9]*"):
            try:
                titled = path.joinpath("cmdline").read_bytes().startswith(b"ray::ServeReplica:kedge:Ingress")
                node = self.node_of(int(path.name)) if titled else None
            except OSError:
                continue
            if node is not None:
                return node
        return None

    def stop(self) -> None:
        self._cluster.shutdown()
        self.redis.stop()
